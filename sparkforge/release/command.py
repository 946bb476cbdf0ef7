"""`build.py release`: check the last build of a target, collect its files, sign them, push."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cyclopts import Parameter

from sparkforge.build import publish, receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions
from sparkforge.build.receipt import PROVENANCE, SUMS, Receipt
from sparkforge.core import git
from sparkforge.core.disk import disk_errors, read_json, sha256_file
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.pins import Pins
from sparkforge.release import signing
from sparkforge.runtime import engine
from sparkforge.sources.project import Checkout, PinsFile, checkout

# files of the checkout that a build reads, beside the plugin's folder
_INPUTS = ("pins.yaml", "patches", "requirements", "scripts", "sparkforge", "Dockerfile")


def inputs(of: Pins) -> tuple[str, ...]:
    """Return the files and folders of a checkout that a build reads."""
    plugin = () if of.plugin is None else (of.plugin.folder.rstrip("/"),)
    return (*_INPUTS, ".dockerignore", *plugin)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``release``."""

    target: str
    """target whose last build to release"""
    push: str | None = None
    """push the image there, with signature, SBOM and provenance"""
    keyless: bool = False
    """sign by identity instead of a key"""
    dry_run: bool = False
    """check, and write, sign and push nothing"""
    signer: signing.Signer = signing.Signer()
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Check the last build of a target, and make a release of it."""
    signer, target = options.signer, options.target
    signs = options.keyless or signer.key is not None
    if options.keyless and signer.key is not None:
        raise UsageError("--keyless and --key conflict", "give only one")
    if not signs and (options.push is not None or signer.no_log):
        msg = "--push and --no-log are for signed releases"
        raise UsageError(msg, "add --key FILE (cosign generate-key-pair), or --keyless")
    signing.check_key(signer.key)
    to = None if options.push is None else engine.repository(options.push)
    here = checkout(options.pins)
    version = release_name(here.pins, here.pins.target(target))
    dist = here.root / "dist" / target
    folder = here.root / "dist" / "releases" / version / target
    commit, built = git.head(here.root), receipt.load(dist / receipt.NAME)
    log.heading(f"{version}, target {target}")
    problems = list(_problems(here, target, version, commit, built, pushes=to is not None))
    if problems or built is None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        msg = f"{version} is not ready for a release:\n{lines}"
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
        if signs:  # the files first: a wrong password is known before hours of pushing
            signing.sign_folder(made, signer)
        if image is not None and reference is not None:
            # the local tag ends with the image's id: no other image ever gets it
            engine.push(image.image_id, reference, image.tag.rpartition(":")[2])
            signing.sign_image(reference, made, signer)
        with disk_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    steps = [
        f"git tag --annotate v{version} {commit}; git push origin v{version}",
        f"upload {folder}/* to the release v{version} of your forge",
        *([f"publish {reference} and the public key"] if reference is not None else []),
    ]
    log.document(
        {
            "release": version,
            "target": target,
            "commit": commit,
            "folder": str(folder),
            "image": reference,
            "signed": signs and not options.dry_run,
            "dry_run": options.dry_run,
            "next": steps,
        }
    )
    log.info(f"{'would write' if options.dry_run else 'wrote'}  {folder}")
    for step in steps:
        log.info(f"next  {step}")
    return 0


def _problems(
    here: Checkout, target: str, version: str, commit: str, built: Receipt | None, *, pushes: bool
) -> Iterator[str]:
    """Yield one line for each reason against a release.

    Args:
        commit: of the checkout, "" without a repository.
        pushes: whether the image is to be pushed.
    """
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
    changes = here.root / "CHANGELOG.md"
    text = changes.read_text(encoding="utf-8") if changes.is_file() else ""
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", text, re.MULTILINE):
        yield f"CHANGELOG.md has no section ## {version} (YYYY-MM-DD)"
    if built is None or not built.files:
        yield f"no build of {target}"
        return
    if built.pins_sha256 != sha256_file(here.pins_path):
        yield "pins.yaml has changed since the build"
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
    elif not git.git_ok(here.root, "diff", "--quiet", made, commit, "--", *inputs(here.pins)):
        yield f"the build is of commit {made[:12]}, whose inputs differ: {again}"
