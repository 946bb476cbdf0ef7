"""`build.py release`: check the last build of a target, collect its files, sign them, push."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from sparkforge.build import publish, receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions
from sparkforge.build.receipt import PROVENANCE, SUMS, Receipt
from sparkforge.check.verify import signing
from sparkforge.check.verify.command import inputs
from sparkforge.core import git
from sparkforge.core.disk import disk_errors, read_json, sha256_file
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime import registry
from sparkforge.sources.project import Checkout, PinsFile, checkout


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


@dataclass(frozen=True)
class Candidate:
    """The last build of a target, which may become a release."""

    here: Checkout
    target: str

    @property
    def version(self) -> str:
        """The first wheel's version and the counter of pins.yaml."""
        return release_name(self.here.pins, self.here.pins.target(self.target))

    @property
    def dist(self) -> Path:
        """Files of the last build."""
        return self.here.root / "dist" / self.target

    @property
    def folder(self) -> Path:
        """Folder of the release."""
        return self.here.root / "dist" / "releases" / self.version / self.target

    @property
    def build(self) -> str:
        """The command that builds it."""
        return f"python3 build.py --target {self.target}"


def run(options: Options) -> int:
    """Check the last build of a target, and make a release of it."""
    if options.keyless and options.signer.key is not None:
        raise UsageError("--keyless and --key conflict", "give only one")
    signs = options.keyless or options.signer.key is not None
    if not signs and (options.push is not None or options.signer.no_log):
        msg = "--push and --no-log are for signed releases"
        raise UsageError(msg, "add --key FILE (cosign generate-key-pair), or --keyless")
    signing.check_key(options.signer.key)
    to = None if options.push is None else registry.repository(options.push)
    here = checkout(options.pins)
    here.pins.target(options.target)
    candidate = Candidate(here, options.target)
    commit, built = git.head(here.root), receipt.load(candidate.dist / receipt.NAME)
    log.heading(f"{candidate.version}, target {candidate.target}")
    if problems := list(check(candidate, commit, built, pushes=to is not None)):
        lines = "\n".join(f"  {problem}" for problem in problems)
        msg = f"{candidate.version} is not ready for a release:\n{lines}"
        raise CheckError(msg, f"commit what differs, then build: {candidate.build}")
    assert built is not None  # checked
    image = built.image if to is not None else None
    reference = None
    if image is not None and to is not None:
        reference = registry.Reference(to, str(image.digest))
    if not options.dry_run:
        made = _collected(candidate, built)
        if signs:  # the files first: a wrong password is known before hours of pushing
            signing.sign_folder(made, options.signer)
        if image is not None and reference is not None:
            # the local tag ends with the image's id: no other image ever gets it
            registry.push(image.image_id, reference, image.tag.rpartition(":")[2])
            signing.sign_image(str(reference), made, options.signer)
        with disk_errors(candidate.folder):
            shutil.rmtree(candidate.folder, ignore_errors=True)
            made.rename(candidate.folder)
    steps = [
        f"git tag --annotate v{candidate.version} {commit}; git push origin v{candidate.version}",
        f"upload {candidate.folder}/* to the release v{candidate.version} of your forge",
        *([f"publish {reference} and the public key"] if reference is not None else []),
    ]
    log.document(
        {
            "release": candidate.version,
            "target": candidate.target,
            "commit": commit,
            "folder": str(candidate.folder),
            "image": None if reference is None else str(reference),
            "signed": signs and not options.dry_run,
            "dry_run": options.dry_run,
            "next": steps,
        }
    )
    log.info(f"{'would write' if options.dry_run else 'wrote'}  {candidate.folder}")
    for step in steps:
        log.info(f"next  {step}")
    return 0


def check(
    candidate: Candidate, commit: str, built: Receipt | None, *, pushes: bool
) -> Iterator[str]:
    """Yield one line for each reason against a release.

    Args:
        commit: of the checkout, "" without a repository.
        pushes: whether the image is to be pushed.
    """
    here, version = candidate.here, candidate.version
    if not commit:
        yield f"{here.root}: no git repository"
        return
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
        yield f"no build of {candidate.target}"
        return
    if built.pins_sha256 != sha256_file(here.pins_path):
        yield "pins.yaml has changed since the build"
    yield from receipt.problems(candidate.dist)
    if here.pins.target(candidate.target).smoke is not None and not any(
        item.stage == "smoke" for item in built.items
    ):
        yield "the build ended before its smoke test"
    yield from _origin(candidate, commit)
    if pushes and built.image is None:
        yield "--push: the last build has no image"
    elif pushes and built.image is not None and built.image.digest is None:
        yield "--push: the engine needs containerd's store (daemon.json: containerd-snapshotter)"


def _origin(candidate: Candidate, commit: str) -> Iterator[str]:
    """Check that the provenance names this commit, or one whose build has the same inputs."""
    statement: Any = read_json(candidate.dist / PROVENANCE)
    try:
        dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        ours = next(part for part in dependencies if part["name"] == "sparkforge")
        made, clean = str(ours["digest"]["gitCommit"]), bool(ours["annotations"]["clean"])
    except (LookupError, TypeError, StopIteration):
        made, clean = "", False
    again = f"remove {candidate.dist / receipt.NAME} and build again"
    if not clean:
        yield f"the build is of files that were not committed: {again}"
    elif not git.git_ok(
        *(candidate.here.root, "diff", "--quiet", made, commit, "--"),
        *inputs(candidate.here.pins),
    ):
        yield f"the build is of commit {made[:12]}, whose inputs differ: {again}"


def _collected(candidate: Candidate, built: Receipt) -> Path:
    """Return a fresh folder beside that of the release, with the files of the build."""
    made = candidate.folder.with_name(f".{candidate.target}.new")
    with disk_errors(made):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        for name in (*built.files, SUMS, receipt.NAME):
            publish.link(candidate.dist / name, made / name)
    return made
