"""`build.py release`: check the last build of a target, collect its files, sign them, push.

cosign does all the cryptography. Neither keys nor passwords are read here.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sparkforge.build import publish, receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions, command_options
from sparkforge.build.receipt import PROVENANCE, SBOM, SUFFIX, SUMS, Receipt
from sparkforge.core import git
from sparkforge.core.disk import disk_errors, read_json
from sparkforge.core.errors import CheckError, CommandError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.pins import Pins
from sparkforge.runtime import engine
from sparkforge.sources.project import Checkout, PinsFile, checkout

SIGNED = (receipt.NAME, SUMS, SBOM, PROVENANCE)
"""The signed files; the receipt has the hashes of all others."""
_ATTACHED = ("cyclonedx", "slsaprovenance1")
"""cosign's names of what is attached to an image: its SBOM and its provenance."""
# a key needs no root of trust; without this cosign would download one
_NO_ROOT = '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}\n'


def inputs(of: Pins) -> tuple[str, ...]:
    """Return the files and folders of a checkout that a build reads."""
    plugin = () if of.plugin is None else (of.plugin.folder.rstrip("/"),)
    files = ("pins.yaml", "Dockerfile", ".dockerignore")
    return (*files, "patches", "requirements", "scripts", "sparkforge", *plugin)


@command_options
class Options:
    target: str
    """target whose last build to release"""
    push: str | None = None
    """push the image there, with signature, SBOM and provenance"""
    dry_run: bool = False
    """check, and write, sign and push nothing"""
    key: str | None = None
    """private key, or a key service's name as cosign writes it; password in COSIGN_PASSWORD"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Check the last build of a target, and make a release of it."""
    key, target = options.key, options.target
    if key is None and options.push is not None:
        msg = "--push is for signed releases"
        raise UsageError(msg, "add --key FILE (cosign generate-key-pair)")
    check_key(key)
    to = None if options.push is None else engine.repository(options.push)
    here = checkout(options.pins)
    version = release_name(here.pins, here.pins.target(target))
    dist = here.root / "dist" / target
    folder = here.root / "dist" / "releases" / version / target
    commit, built = git.head(here.root), receipt.load(dist / receipt.NAME)
    log.heading(f"{version}, target {target}")
    problems = list(_problems(here, target, version, commit, built, pushes=to is not None))
    if problems or built is None:
        msg = "\n  ".join([f"{version} is not ready for a release:", *problems])
        hint = f"commit what differs, then build: python3 build.py --target {target}"
        raise CheckError(msg, hint)
    image = built.image
    reference = None if to is None or image is None else f"{to}@{image.digest}"
    if not options.dry_run:
        made = folder.with_name(f".{target}.new")
        with disk_errors(made):
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
            for name in (*built.files, SUMS, receipt.NAME):
                publish.link(dist / name, made / name)
        if key is not None:  # the files first: a wrong password is known before hours of pushing
            sign_folder(made, key)
        if key is not None and image is not None and reference is not None:
            # the local tag ends with the image's id: no other image ever gets it
            engine.push(image.image_id, reference, image.tag.rpartition(":")[2])
            sign_image(reference, made, key)
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    steps = [
        f"git tag --annotate v{version} {commit}; git push origin v{version}",
        f"upload {folder}/* to the release v{version} of your forge",
        *([f"publish {reference} and the public key"] if reference is not None else []),
    ]
    found = {"release": version, "target": target, "commit": commit, "folder": str(folder)}
    signed = key is not None and not options.dry_run
    log.document({**found, "image": reference, "signed": signed, "next": steps})
    log.info(f"{'would write' if options.dry_run else 'wrote'}  {folder}")
    for step in steps:
        log.info(f"next  {step}")
    return 0


def _problems(
    here: Checkout, target: str, version: str, commit: str, built: Receipt | None, *, pushes: bool
) -> Iterator[str]:
    """Yield one line for each reason against a release; ``commit`` is "" without a repository."""
    if not commit:
        yield f"{here.root}: no git repository"
        return
    dist = here.root / "dist" / target
    if git.git(here.root, "status", "--porcelain", "--untracked-files=normal").strip():
        yield "the checkout has files that are not committed: git status"
    ref = f"refs/tags/v{version}^{{commit}}"
    code, tagged = git.attempt(here.root, "rev-parse", "--verify", "--quiet", ref)
    if code == 0 and tagged.strip() != commit:
        yield f"tag v{version} is another commit: raise release.counter in pins.yaml"
    text = git.attempt(here.root, "show", "HEAD:CHANGELOG.md")[1]
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", text, re.MULTILINE):
        yield f"CHANGELOG.md has no section ## {version} (YYYY-MM-DD)"
    if built is None or not built.files:
        yield f"no build of {target}"
        return
    yield from receipt.problems(dist)
    tested = any(item.stage == "smoke" for item in built.items)
    if here.pins.target(target).smoke is not None and not tested:
        yield "the build ended before its smoke test"
    if pushes and (built.image is None or built.image.digest is None):
        yield "--push: the last build has no image with a digest (containerd's store)"
    # the provenance names this commit, or one whose build has the same inputs
    statement: Any = read_json(dist / PROVENANCE)
    try:
        dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        ours = next(part for part in dependencies if part["name"] == "sparkforge")
        made, clean = str(ours["digest"]["gitCommit"]), bool(ours["annotations"]["clean"])
    except (LookupError, TypeError, StopIteration):
        made, clean = "", False
    again = f"remove {dist / receipt.NAME} and build again"
    if not clean:
        yield f"the build is of files that were not committed: {again}"
    elif git.attempt(here.root, "diff", "--quiet", made, commit, "--", *inputs(here.pins))[0]:
        yield f"the build is of commit {made[:12]}, whose inputs differ: {again}"


# -- signatures --------------------------------------------------------------------------------


def check_key(key: str | None) -> None:
    """Refuse a missing file, or a key in place of its name; ``env://…``, ``pkcs11:…`` are names."""
    if key is not None and "-----BEGIN" in key:
        msg = "--key: is the key itself; others can read command lines"
        raise UsageError(msg, "give a file, or env://VARIABLE")
    if key is not None and ":" not in key and not Path(key).is_file():
        msg = f"--key {key}: no such file"
        raise UsageError(msg, "give an existing key; create one with cosign generate-key-pair")


def sign_folder(folder: Path, key: str) -> None:
    """Sign the files of a build, each into a bundle beside it."""
    for name in SIGNED:
        bundle = folder / (name + SUFFIX)
        _cosign("sign-blob", *_signing(key), *_format(), "--bundle", bundle, folder / name)
        log.info(f"signed  {bundle.name}")


def sign_image(image: str, folder: Path, key: str) -> None:
    """Sign an image in its registry, and attach a folder's SBOM and provenance, signed."""
    _cosign("sign", *_signing(key), image)
    with TemporaryDirectory(prefix="sparkforge-") as work:
        predicate = Path(work) / "predicate.json"
        statement = json.loads((folder / PROVENANCE).read_text())
        predicate.write_text(json.dumps(statement["predicate"]))
        for kind, path in zip(_ATTACHED, (folder / SBOM, predicate), strict=True):
            # --replace: a repeated push leaves one statement of each kind
            how = ("--replace", "--type", kind, "--predicate", path)
            _cosign("attest", *_signing(key), *how, image)
    log.info(f"signed  {image}, with its SBOM and provenance")


def check_folder(folder: Path, key: str) -> list[str]:
    """Check the signatures in a folder, and its files against the signed receipt.

    Returns the names of all signed files. UsageError: it is no folder of a release.
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
    for name in SIGNED:
        bundle = ("--bundle", folder / (name + SUFFIX), folder / name)
        try:
            _verify("verify-blob", key, *_format(), *bundle)
        except CheckError as error:
            problems.append(f"{name}: {error.what}")
    if problems:
        msg = f"{folder}: not verified:\n" + "\n".join(problems)
        raise CheckError(msg, "get it from a trusted source, or build it: build.py")
    return sorted(files)


def check_image(image: str, key: str) -> None:
    """Check the signature of an image in its registry, and of the attached SBOM and provenance."""
    _verify("verify", key, image)
    for kind in _ATTACHED:
        _verify("verify-attestation", key, "--type", kind, image)
    log.info(f"signed: {image}, its SBOM and its provenance")


def _signing(key: str) -> list[str]:
    # no entry in the public log, which a key does not need; cosign 3 has two options for that
    modern = [] if _format() else ["--use-signing-config=false"]
    return ["--yes", "--key", key, "--tlog-upload=false", *modern]


def _format() -> list[str]:
    """Return the option with which cosign 2 uses cosign 3's format; their help differs."""
    text = call("cosign", "sign-blob", "--help", check=False).stdout
    return [] if b"--use-signing-config" in text else ["--new-bundle-format"]


def _verify(command: str, key: str, *words: str | os.PathLike[str]) -> None:
    with TemporaryDirectory(prefix="sparkforge-") as work:
        root = Path(work) / "trusted_root.json"
        root.write_text(_NO_ROOT)
        how = ("--key", key, "--insecure-ignore-tlog", "--trusted-root", root)
        _cosign(command, *how, *words)


def _cosign(*words: str | os.PathLike[str]) -> None:
    try:
        call("cosign", *words)
    except CommandError as error:
        remedy = "see cosign's output; a private key needs its password in COSIGN_PASSWORD"
        raise CheckError(f"cosign: {error.what}", remedy) from None
