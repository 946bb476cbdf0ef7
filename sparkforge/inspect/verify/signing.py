"""`build.py sign`: cosign signs the files in dist/TARGET; `verify --key` checks them.

cosign does all the cryptography. It gets keys by reference (a file, or a name in a key service) and
passwords through its own variable. Neither is read here, so neither can be shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparkforge.build.options import OutputOptions
from sparkforge.build.receipt import PROVENANCE, SBOM, SUFFIX, SUMS, image_of, is_receipt
from sparkforge.core import plain
from sparkforge.core.command import Entry, needed, option, switch
from sparkforge.core.errors import CommandError, SignError, UsageError, VerifyError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.core.programs import have
from sparkforge.core.run import call
from sparkforge.pins import pins
from sparkforge.sources.project import pins_option, recover_checkout

RECEIPT = "receipt.json"
SIGNED = (RECEIPT, SUMS, SBOM, PROVENANCE)
"""The signed files; SHA256SUMS covers the wheels."""
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")
# a key needs no root of trust; without this cosign would download one
_NO_ROOT = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}\n'
_HINTS = (
    ("decryption failed", "COSIGN_PASSWORD is wrong for this key"),
    ("inappropriate ioctl", "set COSIGN_PASSWORD to the key's password"),
    ("device flow", "without --key cosign needs an identity: set SIGSTORE_ID_TOKEN, or use --key"),
)


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


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``sign``."""

    target: str = needed("target whose newest build to sign", metavar="NAME")
    key: str | None = option(
        "private key, or a key service's name as cosign writes it; password in"
        " COSIGN_PASSWORD (default: keyless, by identity)",
        metavar="FILE",
    )
    no_log: bool = switch("make no entry in the public transparency log; needs no network")
    image: str | None = option(
        "also sign the image in the registry that it was pushed to", metavar="REPOSITORY@sha256:…"
    )
    pins: Path | None = pins_option()
    output: OutputOptions


# -- signing ---------------------------------------------------------------------------


def run(options: Options) -> int:
    """Sign the files of a target's newest build, and the image if it was pushed."""
    path = recover_checkout(options.pins)
    target = pins.load(path).target(options.target)
    folder = path.parent / "dist" / options.target
    if not (folder / RECEIPT).is_file():
        msg = f"{folder / RECEIPT}: does not exist: nothing to sign"
        raise SignError(msg, f"build it first: python3 build.py --target {options.target}")
    _check_words(options)
    image = _image(options.image, folder) if options.image else None
    problems = sums(folder)
    if problems:
        msg = f"{folder}: differs from the build:\n" + "\n".join(f"  {one}" for one in problems)
        raise SignError(msg, f"build it again: python3 build.py --target {options.target}")
    _need_cosign()
    how = _how(options)
    signed = [folder / name for name in SIGNED if (folder / name).is_file()]
    for path in signed:
        # made beside its place, so that a failure leaves no signature of something else
        fresh = path.with_name(f".{path.name}{SUFFIX}.new")
        _cosign("sign-blob", *how, *_bundle_format(), "--bundle", fresh, path)
        fresh.rename(path.with_name(path.name + SUFFIX))
        log.info(f"signed  {path.name}{SUFFIX}")
    if image is not None:
        _sign_image(image, folder, how)
    log.info(f"{target.summary}: {len(signed)} files{', 1 image' if image else ''} signed")
    if options.output.json:
        log.json({"signed": [path.name for path in signed], "image": image})
    return 0


def _check_words(options: Options) -> None:
    if options.key and "-----BEGIN" in options.key:
        msg = "--key: is the key itself; others can read command lines"
        raise UsageError(msg, "give a file, or env://VARIABLE")
    if options.key is None and options.no_log:
        msg = "--no-log: without a key, only the log proves the identity"
        raise UsageError(msg, "add --key, or omit --no-log")
    _check_key(options.key)


def _check_key(key: str | None) -> None:
    """Refuse a file that is not there; ``awskms://…``, ``env://…``, ``pkcs11:…`` are no files."""
    if key is not None and ":" not in key and not Path(key).is_file():
        msg = f"--key {key}: no such file"
        raise UsageError(msg, "give an existing key; create one with cosign generate-key-pair")


def _image(named: str, folder: Path) -> str:
    """Return a reference, once it is clear that it is the image of this receipt.

    Raises:
        UsageError: it has no digest, or another version wrote the receipt.
        SignError: it has another digest than the receipt.
    """
    match = _DIGEST.search(named)
    if match is None:
        msg = f"--image {named}: a tag can change"
        raise UsageError(msg, "use the reference that docker push prints: REPOSITORY@sha256:…")
    built = image_of(_receipt(folder), folder / RECEIPT)
    digest = None if built is None else built.digest
    if match[1] != digest:
        recorded = digest or "no image digest"
        msg = f"--image {named}: is not the built image; the receipt has {recorded}"
        raise SignError(msg, "push that image and give its digest")
    return named


def _sign_image(image: str, folder: Path, how: Sequence[str]) -> None:
    """Sign an image in its registry, and attach bill and provenance as signed statements."""
    _cosign("sign", *how, image)
    log.info(f"signed  {image}")
    with TemporaryDirectory(prefix="sparkforge-") as work:
        predicate = Path(work) / "predicate.json"
        statement = plain.json_of((folder / PROVENANCE).read_text())
        predicate.write_text(json.dumps(statement["predicate"]))
        for kind, path in (("cyclonedx", folder / SBOM), ("slsaprovenance1", predicate)):
            _cosign("attest", *how, "--type", kind, "--predicate", path, image)
            log.info(f"attested  {kind} of {image}")


def _how(options: Options) -> list[str]:
    words = ["--yes", *(["--key", options.key] if options.key else [])]
    if options.no_log:
        words.append("--tlog-upload=false")
        if "--use-signing-config" in _help():  # cosign 3 refuses the one without the other
            words.append("--use-signing-config=false")
    return words


# -- checking --------------------------------------------------------------------------


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
    return True


def check_folder(folder: Path, trust: Trust) -> list[str]:
    """Check the signatures in a folder, and its files against the signed hashes.

    Returns:
        The names of all files that are vouched for.

    Raises:
        VerifyError: a signature is missing or is another's, or a file is not the signed one.
        SignError: cosign is not there.
    """
    problems = []
    names = [name for name in SIGNED if (folder / name).exists()]
    if RECEIPT not in names:
        raise UsageError(f"{folder}: has no {RECEIPT}", "give a folder that build.py published")
    _need_cosign()
    for name in names:
        bundle = folder / (name + SUFFIX)
        if not bundle.is_file():
            problems.append(f"{name}: not signed: there is no {bundle.name}")
        elif why := _refused("verify-blob", trust, "--bundle", bundle, folder / name):
            problems.append(f"{name}: {why}")
    problems = problems or sums(folder)  # the list of files is valid if it is signed itself
    if problems:
        msg = f"{folder}: does not match its signatures:\n" + "\n".join(f"  {p}" for p in problems)
        raise VerifyError(msg, "get the files from a trusted source, or build them: build.py")
    return [*names, *_sums(folder)]


def check_image(image: str, trust: Trust) -> None:
    """Check an image's signature in its registry.

    Raises:
        VerifyError: it has no valid signature.
    """
    _need_cosign()
    if why := _refused("verify", trust, image):
        msg = f"{image}: {why}"
        raise VerifyError(msg, "get the image from a trusted source, or build it: build.py")


def sums(folder: Path) -> list[str]:
    """Compare the files of a folder with SHA256SUMS and the receipt; one line for each problem."""
    listed, problems = _sums(folder), []
    if listed != _receipt(folder).get("files"):
        problems.append(f"{SUMS} and {RECEIPT} do not list the same files and hashes")
    for name, sha256 in listed.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing, but {SUMS} lists it")
        elif sha256_file(path) != sha256:
            problems.append(f"{name}: differs from {SUMS}")
    known = {*listed}
    problems += [
        f"{path.name}: not in {SUMS}"
        for path in sorted(folder.glob("*.whl"))
        if path.name not in known
    ]
    return problems


def _sums(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file in SHA256SUMS, without those of other folders."""
    path = folder / SUMS
    found = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        sha256, _, name = line.partition("  ")
        if "/" in name or not re.fullmatch(r"[0-9a-f]{64}", sha256) or not name:
            raise VerifyError(f"{path}: {line[:80]!r} is not a valid line", "get the file again")
        found[name] = sha256
    return found


def _receipt(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = plain.json_of((folder / RECEIPT).read_text())
    except ValueError:
        found = {}
    if not is_receipt(found):
        raise VerifyError(f"{folder / RECEIPT}: is not a receipt", "get the file again")
    return found


def _refused(command: str, trust: Trust, *words: str | Path) -> str:
    """Return why cosign does not accept a signature, or ""."""
    with _whose(trust) as whose:
        try:
            _cosign(command, *whose, *(_bundle_format() if "-blob" in command else ()), *words)
        except SignError as error:
            return error.what.strip().splitlines()[-1].strip()
    return ""


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


def _need_cosign() -> None:
    if not have("cosign"):
        msg = "cosign is not on the PATH"
        raise SignError(msg, "install cosign 2.5 or newer, e.g. apt-get install cosign")


def _help() -> str:
    """Return the features of this cosign: Debian's builds do not report their version."""
    return call("cosign", "sign-blob", "--help", check=False).stdout.decode(errors="replace")


def _bundle_format() -> list[str]:
    """Return the options with which cosign 2 uses cosign 3's format."""
    return [] if "--use-signing-config" in _help() else ["--new-bundle-format"]


def _cosign(*words: str | Path) -> None:
    """Run cosign.

    Raises:
        SignError: it refuses.
    """
    try:
        # without a key cosign prompts the user to open a page, and waits
        call("cosign", *words, stream=words[0] in ("sign", "sign-blob") and "--key" not in words)
    except CommandError as error:
        hints = (hint for sign, hint in _HINTS if sign in error.what)
        remedy = next(hints, "see cosign's output above")
        raise SignError(f"cosign {words[0]} failed:\n{error.what}", remedy) from None


COMMANDS = (Entry("sign", Options, run),)
