"""cosign: signatures of files, and of images with their attachments.

cosign does all the cryptography. It gets keys by reference (a file, or a name in a key service) and
passwords through its own variable. Neither is read here, so neither can appear in output.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

from sparkforge.build.receipt import PROVENANCE, SBOM
from sparkforge.core import plain
from sparkforge.core.command import option, switch
from sparkforge.core.errors import SignError, SparkforgeError, StoreError, UsageError, VerifyError
from sparkforge.core.log import log
from sparkforge.core.run import call, failure, have
from sparkforge.runtime import registry

BILL, HISTORY = "cyclonedx", "slsaprovenance1"
"""cosign's names of an image's attachments: its bill of materials and its provenance."""
# a key needs no root of trust; without this cosign would download one
_NO_ROOT = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}\n'
_SIGNING = ("sign", "sign-blob", "attest")
_UNTRUSTED = "get the image from a trusted source, or build it: build.py"
_VERDICTS = range(10, 14)
"""Exit codes of ``cosign verify``: unsigned, no such tag, not this signer, no certificate."""
_PUBLIC = re.compile(rb"^-----BEGIN (RSA )?PUBLIC KEY-----", re.MULTILINE)
_KEY_BYTES = 1 << 20
_SEE = "see cosign's output above"


@dataclass(frozen=True)
class Trust:
    """The accepted signer: a public key, or an identity with its issuer.

    Attributes:
        key: file of a public key, or its name in a key service.
    """

    key: str | None = option("require signatures by this public key", metavar="FILE")
    identity: str | None = option(
        "require keyless signatures by this identity (e-mail or URI)", metavar="WHO"
    )
    issuer: str | None = option("OIDC issuer of --identity", metavar="URL")


@dataclass(frozen=True)
class Signer:
    """The signer."""

    key: str | None = option(
        "private key, or a key service's name as cosign writes it; password in COSIGN_PASSWORD",
        default_is="keyless, by identity",
        metavar="FILE",
    )
    no_log: bool = switch("make no entry in the public transparency log; needs no network")


# -- options -------------------------------------------------------------------------


def required(trust: Trust) -> bool:
    """Return whether signatures are required.

    Raises:
        UsageError: the options conflict.
    """
    if trust.key is None and trust.identity is None and trust.issuer is None:
        return False
    if trust.key is not None and (trust.identity or trust.issuer):
        raise UsageError("--key and --identity conflict", "give only one")
    if trust.key is None and not (trust.identity and trust.issuer):
        msg = "--identity and --issuer need each other"
        raise UsageError(msg, "give both: --identity me@example.org --issuer https://…")
    _check_key(trust.key)
    if trust.key is not None and _is_file(trust.key):
        _check_public(Path(trust.key))
    return True


def check_signer(signer: Signer) -> None:
    """Refuse an invalid key before any work.

    Raises:
        UsageError: the options conflict, or the key does not exist.
    """
    if signer.key and "-----BEGIN" in signer.key:
        msg = "--key: is the key itself; others can read command lines"
        raise UsageError(msg, "give a file, or env://VARIABLE")
    if signer.key is None and signer.no_log:
        msg = "--no-log: without a key, only the log proves the identity"
        raise UsageError(msg, "add --key, or omit --no-log")
    _check_key(signer.key)


def _check_key(key: str | None) -> None:
    """Refuse a missing file; ``awskms://…``, ``env://…``, ``pkcs11:…`` are not files."""
    if key is not None and _is_file(key) and not Path(key).is_file():
        msg = f"--key {key}: no such file"
        raise UsageError(msg, "give an existing key; create one with cosign generate-key-pair")


def _check_public(key: Path) -> None:
    """Refuse a file without a public key: cosign's error looks like a wrong signature."""
    try:
        with key.open("rb") as file:
            found = _PUBLIC.search(file.read(_KEY_BYTES))
    except OSError as error:
        msg = f"--key {key}: {error.strerror}"
        raise UsageError(msg, "give a file that you can read") from error
    if found is None:
        msg = f"--key {key}: is no public key"
        raise UsageError(msg, "give cosign.pub, or write it: cosign public-key --key FILE")


def _is_file(key: str) -> bool:
    return ":" not in key


# -- signing -------------------------------------------------------------------------


def signing_words(signer: Signer) -> list[str]:
    """Return cosign's options for a signer."""
    words = ["--yes", *(["--key", signer.key] if signer.key else [])]
    if signer.no_log:
        words.append("--tlog-upload=false")
        if "--use-signing-config" in _help():  # cosign 3 refuses the one without the other
            words.append("--use-signing-config=false")
    return words


def sign_image(image: str, folder: Path, signer: Signer) -> None:
    """Sign an image in its registry, and attach bill and provenance as signed statements.

    Args:
        image: REPOSITORY@sha256:….
        folder: with the bill and the provenance.

    Raises:
        SignError: cosign is missing or fails.
    """
    need()
    how = signing_words(signer)
    run("sign", *how, image)
    log.info(f"signed  {image}")
    with TemporaryDirectory(prefix="sparkforge-") as work:
        predicate = Path(work) / "predicate.json"
        statement = plain.json_of((folder / PROVENANCE).read_text())
        predicate.write_text(json.dumps(statement["predicate"]))
        for kind, path in ((BILL, folder / SBOM), (HISTORY, predicate)):
            # --replace: a repeated push leaves one statement of each kind
            run("attest", *how, "--replace", "--type", kind, "--predicate", path, image)
            log.info(f"attested  {kind} of {image}")


# -- checking ------------------------------------------------------------------------


def check_image(image: str, trust: Trust) -> None:
    """Check an image's signature in its registry.

    Raises:
        VerifyError: it has no valid signature.
    """
    need()
    if why := refused("verify", trust, image):
        raise VerifyError(f"{image}: {why}", _UNTRUSTED)


def attested(image: str, kind: str, trust: Trust) -> list[Any]:
    """Return an image's predicates of a kind in its registry, signed by the trusted signer.

    Raises:
        VerifyError: there is none.
        SignError: cosign is missing.
    """
    need()
    try:
        with _whose(trust) as whose:
            said = run("verify-attestation", *whose, "--type", kind, image)
        envelopes = [plain.json_of(line) for line in said.splitlines() if line.startswith(b"{")]
        found = [
            plain.json_of(b64decode(envelope["payload"]))["predicate"] for envelope in envelopes
        ]
    except SignError as error:
        msg = f"{image}: {kind}: {registry.last_line(error.what)}"
        raise VerifyError(msg, _UNTRUSTED) from None
    except (ValueError, LookupError, TypeError):
        msg = f"{image}: {kind}: the attached statement has another format"
        raise VerifyError(msg, _UNTRUSTED) from None
    if not found:
        raise VerifyError(f"{image}: {kind}: nothing is attached", _UNTRUSTED)
    return found


def refused(command: str, trust: Trust, *words: str | Path) -> str:
    """Return the reason why cosign does not accept a signature, or "".

    Raises:
        VerifyError: cosign fails, without a verdict about an image.
        RegistryError: as ``run``.
    """
    with _whose(trust) as whose:
        blob = bundle_format() if command == "verify-blob" else ()
        done = _ran(command, *whose, *blob, *words)
    if not done.returncode:
        return ""
    # for a file cosign only says that it failed
    if command == "verify" and done.returncode not in _VERDICTS:
        error = _failure(done)
        if isinstance(error, SignError):
            raise VerifyError(f"{words[-1]}: not verified: {error.what}", error.remedy)
        raise error
    return registry.last_line(failure(done).what)


@contextmanager
def _whose(trust: Trust) -> Iterator[list[str]]:
    """Return cosign's options for the accepted signer.

    A key's signature is valid with or without a log. An identity's certificate is valid for
    minutes, and only the log proves that the signature is from that time, so the log is required.
    """
    if trust.key is None:
        yield [
            "--certificate-identity",
            str(trust.identity),
            "--certificate-oidc-issuer",
            str(trust.issuer),
        ]
        return
    with TemporaryDirectory(prefix="sparkforge-") as work:
        root = Path(work) / "trusted_root.json"
        root.write_text(_NO_ROOT)
        yield ["--key", trust.key, "--insecure-ignore-tlog", "--trusted-root", str(root)]


# -- cosign ----------------------------------------------------------------------------


def need() -> None:
    """Refuse to start without cosign.

    Raises:
        SignError: it is missing.
    """
    if not have("cosign"):
        msg = "cosign is not on the PATH"
        raise SignError(msg, "install cosign 2.5 or newer, e.g. apt-get install cosign")


def _help() -> str:
    """Return the features of this cosign: Debian's builds do not report their version."""
    return call("cosign", "sign-blob", "--help", check=False).stdout.decode(errors="replace")


def bundle_format() -> list[str]:
    """Return the options with which cosign 2 uses cosign 3's format."""
    return [] if "--use-signing-config" in _help() else ["--new-bundle-format"]


def run(*words: str | Path) -> bytes:
    """Run cosign; return its output.

    Raises:
        SignError: it refuses.
        RegistryError: the registry cannot be reached, or denies access.
    """
    done = _ran(*words)
    if done.returncode:
        raise _failure(done)
    return done.stdout


def _ran(*words: str | Path) -> CompletedProcess[bytes]:
    # without a key cosign prompts the user to open a page, and waits
    asks = words[0] in _SIGNING and "--key" not in words
    return call("cosign", *words, stream=asks, check=False)


def _failure(done: CompletedProcess[bytes]) -> SparkforgeError:
    """Return the error of a failed cosign, by the facts in its output."""
    _, command, *words = done.args
    error = failure(done)
    if isinstance(error, StoreError):
        return error
    if "-blob" not in command and _names(error.what, registry.host_of(words[-1])):
        what = "upload" if command in _SIGNING else "look-up"
        if refusal := registry.refusal(what, words[-1], error.what):
            return refusal
    msg = f"cosign {command} failed:\n{error.what}"
    return SignError(msg, _remedy(words) if command in _SIGNING else _SEE)


def _names(text: str, host: str) -> bool:
    """Return whether a text has an address of a host: cosign also uses other services."""
    return re.search(rf"//([\w.-]+\.)?{re.escape(host)}/", text) is not None


def _remedy(words: Sequence[str]) -> str:
    """Return the hint for a failed signature.

    Args:
        words: cosign's arguments.
    """
    if "--key" not in words:
        return f"{_SEE}; without --key it needs an identity: SIGSTORE_ID_TOKEN, or its page"
    key = words[words.index("--key") + 1]
    if not call("cosign", "public-key", "--key", key, check=False).returncode:
        return _SEE
    if "COSIGN_PASSWORD" not in os.environ:
        return "cosign cannot use this key: set COSIGN_PASSWORD to its password"
    return "cosign cannot use this key: check the key and COSIGN_PASSWORD"
