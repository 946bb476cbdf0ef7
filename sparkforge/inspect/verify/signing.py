"""`build.py sign`: cosign signs the files in dist/TARGET; `verify --key` checks them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build import receipt
from sparkforge.build.options import OutputOptions
from sparkforge.build.receipt import PROVENANCE, RELEASE, SBOM, SUFFIX, SUMS, Receipt
from sparkforge.core.command import Entry, needed, option
from sparkforge.core.disk import read_json
from sparkforge.core.errors import SignError, UsageError, VerifyError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.inspect.verify import cosign
from sparkforge.sources.project import checkout, pins_option

SIGNED = (receipt.NAME, SUMS, SBOM, PROVENANCE, RELEASE)
"""The signed files; SHA256SUMS covers the wheels, a release.json the rest of its folder."""
_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``sign``."""

    target: str = needed("target whose newest build to sign", metavar="NAME")
    signer: cosign.Signer
    image: str | None = option(
        "also sign the image in the registry that it was pushed to", metavar="REPOSITORY@sha256:…"
    )
    pins: Path | None = pins_option()
    output: OutputOptions


# -- signing ---------------------------------------------------------------------------


def run(options: Options) -> int:
    """Sign the files of a target's newest build, and the image if it was pushed."""
    here = checkout(options.pins)
    target = here.pins.target(options.target)
    folder = here.root / "dist" / options.target
    if not (folder / receipt.NAME).is_file():
        msg = f"{folder / receipt.NAME}: does not exist: nothing to sign"
        raise SignError(msg, f"build it first: python3 build.py --target {options.target}")
    cosign.check_signer(options.signer)
    image = _image(options.image, folder) if options.image else None
    signed = sign_folder(folder, options.signer, f"build.py --target {options.target}")
    if image is not None:
        cosign.sign_image(image, folder, options.signer)
    log.info(f"{target.summary}: {len(signed)} files{', 1 image' if image else ''} signed")
    log.document({"signed": signed, "image": image})
    return 0


def sign_folder(folder: Path, signer: cosign.Signer, again: str) -> list[str]:
    """Sign the files of a folder, each into a bundle beside it; return their names.

    Args:
        again: command that writes the folder again, for the hint.

    Raises:
        SignError: a file differs from the build, or cosign is missing or fails.
    """
    problems = sums(folder)
    if problems:
        msg = f"{folder}: differs from the build:\n" + "\n".join(problems)
        raise SignError(msg, f"build it again: python3 {again}")
    signed = [name for name in SIGNED if (folder / name).is_file()]
    for name in signed:
        sign_file(folder / name, signer)
    return signed


def sign_file(path: Path, signer: cosign.Signer) -> None:
    """Sign a file, into a bundle beside it.

    Raises:
        SignError: cosign is missing or fails.
    """
    cosign.need()
    how = (*cosign.signing_words(signer), *cosign.bundle_format())
    # written beside its place, so that a failure leaves no wrong signature
    fresh = path.with_name(f".{path.name}{SUFFIX}.new")
    cosign.run("sign-blob", *how, "--bundle", fresh, path)
    fresh.rename(path.with_name(path.name + SUFFIX))
    log.info(f"signed  {path.name}{SUFFIX}")


def _image(named: str, folder: Path) -> str:
    """Return a reference, after checking that it is the receipt's image.

    Raises:
        UsageError: it has no digest, or another version wrote the receipt.
        SignError: it has another digest than the receipt.
    """
    match = _DIGEST.search(named)
    if match is None:
        msg = f"--image {named}: a tag can change"
        raise UsageError(msg, "use the reference that docker push prints: REPOSITORY@sha256:…")
    built = _receipt(folder).image
    digest = None if built is None else built.digest
    if match[1] != digest:
        recorded = digest or "no image digest"
        msg = f"--image {named}: is not the built image; the receipt has {recorded}"
        raise SignError(msg, "push that image and give its digest")
    return named


# -- checking --------------------------------------------------------------------------


def check_folder(folder: Path, trust: cosign.Trust) -> list[str]:
    """Check the signatures in a folder, and its files against the signed hashes.

    Returns:
        The names of all signed files.

    Raises:
        VerifyError: a signature is missing or is another's, or a file is not the signed one.
        SignError: cosign is missing.
    """
    problems = []
    names = [name for name in SIGNED if (folder / name).exists()]
    if receipt.NAME not in names:
        raise UsageError(
            f"{folder}: has no {receipt.NAME}", "give a folder that build.py published"
        )
    cosign.need()
    for name in names:
        bundle = folder / (name + SUFFIX)
        if not bundle.is_file():
            problems.append(f"{name}: not signed: there is no {bundle.name}")
        elif why := cosign.refused("verify-blob", trust, "--bundle", bundle, folder / name):
            problems.append(f"{name}: {why}")
    problems = problems or sums(folder)  # the list of files is signed itself
    if problems:
        msg = f"{folder}: not verified:\n" + "\n".join(problems)
        raise VerifyError(msg, "get the files from a trusted source, or build them: build.py")
    return sorted({*names, *_sums(folder), *_released(folder)})


def sums(folder: Path) -> list[str]:
    """Compare the files of a folder with SHA256SUMS and the receipt; one line for each problem."""
    listed, problems = _sums(folder), []
    if listed != _receipt(folder).files:
        problems.append(f"{SUMS} and {receipt.NAME} do not list the same files and hashes")
    for where, files in ((SUMS, listed), (RELEASE, _released(folder))):
        for name, sha256 in files.items():
            path = folder / name
            if not path.is_file():
                problems.append(f"{name}: missing, but {where} lists it")
            elif sha256_file(path) != sha256:
                problems.append(f"{name}: differs from {where}")
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


def _released(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file in a release.json, {} without one."""
    path = folder / RELEASE
    if not path.is_file():
        return {}
    listed = (read_json(path) or {}).get("files")
    if not isinstance(listed, dict) or any("/" in name for name in listed):
        raise VerifyError(f"{path}: is not the record of a release", "get the file again")
    return {str(name): str(sha256) for name, sha256 in listed.items()}


def _receipt(folder: Path) -> Receipt:
    found = receipt.load(folder / receipt.NAME)
    if found is None:
        raise VerifyError(f"{folder / receipt.NAME}: is not a receipt", "get the file again")
    return found


COMMANDS = (Entry("sign", Options, run),)
