"""Signatures by cosign: of the files of a release, and of an image with its SBOM and provenance.

cosign does all the cryptography. It gets keys by reference (a file, or a name in a key service) and
passwords through its own variable. Neither is read here, so neither can appear in output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cyclopts import Parameter

from sparkforge.build import receipt
from sparkforge.build.receipt import PROVENANCE, SBOM, SUFFIX, SUMS
from sparkforge.core.errors import CheckError, CommandError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call

SIGNED = (receipt.NAME, SUMS, SBOM, PROVENANCE)
"""The signed files; the receipt has the hashes of all others."""
_ATTACHED = ("cyclonedx", "slsaprovenance1")
"""cosign's names of what is attached to an image: its SBOM and its provenance."""
# a key needs no root of trust; without this cosign would download one
_NO_ROOT = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}\n'


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Trust:
    """The accepted signer: a public key, or an identity with its issuer."""

    key: str | None = None
    """require signatures by this public key"""
    identity: str | None = None
    """require keyless signatures by this identity (e-mail or URI)"""
    issuer: str | None = None
    """OIDC issuer of --identity"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Signer:
    """The signer; without a key, an identity."""

    key: str | None = None
    """private key, or a key service's name as cosign writes it; password in COSIGN_PASSWORD"""
    no_log: bool = False
    """make no entry in the public transparency log; needs no network"""


def required(trust: Trust) -> bool:
    """Return whether signatures are required; UsageError: the options conflict."""
    named = trust.identity is not None
    if named != (trust.issuer is not None) or (named and trust.key is not None):
        msg = "not one signer: --key FILE, or --identity with --issuer"
        raise UsageError(msg, "give --key FILE, or --identity me@example.org --issuer https://…")
    check_key(trust.key)
    return named or trust.key is not None


def check_key(key: str | None) -> None:
    """Refuse a missing file, or a key in place of its name; ``env://…``, ``pkcs11:…`` are names."""
    if key is not None and "-----BEGIN" in key:
        msg = "--key: is the key itself; others can read command lines"
        raise UsageError(msg, "give a file, or env://VARIABLE")
    if key is not None and ":" not in key and not Path(key).is_file():
        msg = f"--key {key}: no such file"
        raise UsageError(msg, "give an existing key; create one with cosign generate-key-pair")


def sign_folder(folder: Path, signer: Signer) -> list[str]:
    """Sign the files of a build, each into a bundle beside it; return their names."""
    for name in SIGNED:
        bundle = folder / (name + SUFFIX)
        how = [*_signer(signer), *_bundle_format()]
        _cosign("sign-blob", *how, "--bundle", bundle, folder / name)
        log.info(f"signed  {bundle.name}")
    return list(SIGNED)


def sign_image(image: str, folder: Path, signer: Signer) -> None:
    """Sign an image in its registry, and attach SBOM and provenance as signed statements.

    Args:
        image: REGISTRY/NAME@sha256:….
        folder: with the SBOM and the provenance.
    """
    how = _signer(signer)
    _cosign("sign", *how, image)
    with TemporaryDirectory(prefix="sparkforge-") as work:
        predicate = Path(work) / "predicate.json"
        statement = json.loads((folder / PROVENANCE).read_text())
        predicate.write_text(json.dumps(statement["predicate"]))
        for kind, path in zip(_ATTACHED, (folder / SBOM, predicate), strict=True):
            # --replace: a repeated push leaves one statement of each kind
            _cosign("attest", *how, "--replace", "--type", kind, "--predicate", path, image)
    log.info(f"signed  {image}, with its SBOM and provenance")


def check_folder(folder: Path, trust: Trust) -> list[str]:
    """Check the signatures in a folder, and its files against the signed receipt.

    Returns:
        The names of all signed files.

    Raises:
        UsageError: it is no folder of a release.
        CheckError: a signature is missing or is another's, or a file is not the signed one.
    """
    built = receipt.load(folder / receipt.NAME)
    if built is None:
        msg = f"{folder}: has no valid {receipt.NAME}"
        raise UsageError(msg, "give the folder of a release, or REGISTRY/NAME@sha256:…")
    files = {*SIGNED, *built.files}
    known = {*files, *(name + SUFFIX for name in SIGNED)}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    problems = receipt.problems(folder, built)  # whose hashes are signed themselves
    problems += [f"{name}: not signed" for name in sorted(there - known)]
    with _trusted(trust) as how:
        for name in SIGNED:
            try:
                bundle = folder / (name + SUFFIX)
                _cosign("verify-blob", *how, *_bundle_format(), "--bundle", bundle, folder / name)
            except CheckError as error:
                problems.append(f"{name}: {error.what}")
    if problems:
        msg = f"{folder}: not verified:\n" + "\n".join(problems)
        raise CheckError(msg, "get it from a trusted source, or build it: build.py")
    return sorted(files)


def check_image(image: str, trust: Trust) -> None:
    """Check the signature of an image in its registry, and of the attached SBOM and provenance."""
    with _trusted(trust) as how:
        _cosign("verify", *how, image)
        for kind in _ATTACHED:
            _cosign("verify-attestation", *how, "--type", kind, image)
    log.info(f"signed: {image}, its SBOM and its provenance")


@contextmanager
def _trusted(trust: Trust) -> Iterator[list[str]]:
    """Yield cosign's options for the accepted signer.

    A key's signature is valid with or without a log. An identity's certificate is valid for
    minutes, and only the log proves that the signature is from that time, so the log is required.
    """
    if trust.key is None:
        who, issuer = str(trust.identity), str(trust.issuer)
        yield ["--certificate-identity", who, "--certificate-oidc-issuer", issuer]
        return
    with TemporaryDirectory(prefix="sparkforge-") as work:
        root = Path(work) / "trusted_root.json"
        root.write_text(_NO_ROOT)
        yield ["--key", trust.key, "--insecure-ignore-tlog", "--trusted-root", str(root)]


def _signer(signer: Signer) -> list[str]:
    words = ["--yes", *(["--key", signer.key] if signer.key else [])]
    if signer.no_log:
        words.append("--tlog-upload=false")
        if not _bundle_format():  # cosign 3 refuses the one without the other
            words.append("--use-signing-config=false")
    return words


def _bundle_format() -> list[str]:
    """Return the option with which cosign 2 uses cosign 3's format.

    They differ in their help: Debian's builds do not report their version.
    """
    text = call("cosign", "sign-blob", "--help", check=False).stdout
    return [] if b"--use-signing-config" in text else ["--new-bundle-format"]


def _cosign(*words: str | os.PathLike[str]) -> None:
    """Run cosign; CheckError with its output if it fails."""
    signs = words[0] in ("sign", "sign-blob", "attest")
    try:
        # without a key cosign asks the user to open a page, and waits
        call("cosign", *words, stream=signs and "--key" not in words)
    except CommandError as error:
        remedy = "see cosign's output; a private key needs its password in COSIGN_PASSWORD"
        raise CheckError(f"cosign: {error.what}", remedy) from None
