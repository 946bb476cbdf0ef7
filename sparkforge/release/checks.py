"""Checks of a build before its release: one row each; a failed one has a hint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from sparkforge.build import receipt
from sparkforge.build.context import release_name
from sparkforge.build.receipt import PROVENANCE, Receipt
from sparkforge.build.results import ImageResult
from sparkforge.core import git
from sparkforge.core.disk import read_json
from sparkforge.core.errors import SparkforgeError
from sparkforge.core.hashing import sha256_file
from sparkforge.inspect.verify import signing
from sparkforge.inspect.verify.command import inputs
from sparkforge.pins.pins import Pins
from sparkforge.release import notes

_NOT_BUILT = "no build of {}"


@dataclass(frozen=True)
class Check:
    """A row.

    Attributes:
        said: the finding.
        hint: next step, where it failed.
    """

    name: str
    ok: bool
    said: str
    hint: str = ""


@dataclass(frozen=True)
class Candidate:
    """A build that may become a release.

    Attributes:
        pages: raises StaleError if a generated page is out of date.
        page: makes the report; raises SparkforgeError if it cannot.
    """

    root: Path
    pins_path: Path
    pins: Pins
    target: str
    pages: Callable[[], object]
    page: Callable[[], str]

    @property
    def version(self) -> str:
        """Name of the release: the first wheel's version and the counter of pins.yaml."""
        return release_name(self.pins, self.pins.target(self.target))

    @property
    def tag(self) -> str:
        """Tag of the release in git."""
        return f"v{self.version}"

    @property
    def folder(self) -> Path:
        """Files of the last build."""
        return self.root / "dist" / self.target

    @property
    def build(self) -> str:
        """Command that builds it."""
        return f"python3 build.py --target {self.target}"


def tagged(candidate: Candidate) -> str:
    """Return the commit of the release's tag, or "" if there is none."""
    ref = f"refs/tags/{candidate.tag}^{{commit}}"
    code, found = git.attempt(candidate.root, "rev-parse", "--verify", "--quiet", ref)
    return found.strip() if code == 0 else ""


def receipt_of(candidate: Candidate) -> Receipt | None:
    """Return the receipt of the last build; None if there is none."""
    return receipt.load(candidate.folder / receipt.NAME)


def built_image(candidate: Candidate) -> ImageResult | None:
    """Return the image of the last build; None if it has none.

    Raises:
        UsageError: another version of sparkforge wrote the receipt.
    """
    built = receipt_of(candidate)
    return None if built is None else built.image


def check(candidate: Candidate) -> Iterator[Check]:
    """Yield the result of each check; cheap ones first."""
    commit = git.head(candidate.root)
    yield from _checkout(candidate, commit)
    yield _changelog(candidate)
    yield _made("pages", candidate.pages, "generated pages agree with pins and patches")
    built = receipt_of(candidate)
    if built is None:
        yield Check("build", False, _NOT_BUILT.format(candidate.target), candidate.build)
        return
    yield _files(candidate, built)
    yield _origin(candidate, commit)
    yield _smoke(candidate, built)
    yield _made("report", candidate.page, "can be made")


def _checkout(candidate: Candidate, commit: str) -> Iterator[Check]:
    if not commit:
        yield Check(
            "checkout", False, f"{candidate.root}: no git repository", "release from a clone"
        )
        return
    changed = git.git(
        candidate.root, "status", "--porcelain", "--untracked-files=normal"
    ).splitlines()
    said = f"clean, commit {commit[:12]}"
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        said = f"not committed: {', '.join(line[3:] for line in changed[:3])}{more}"
    yield Check("checkout", not changed, said, "commit or remove these files, then build again")
    free = tagged(candidate) in ("", commit)
    yield Check(
        "version",
        free,
        f"{candidate.version}" + ("" if free else f": tag {candidate.tag} is another commit"),
        "raise release.counter in pins.yaml",
    )


def _changelog(candidate: Candidate) -> Check:
    path = candidate.root / notes.NAME
    found = notes.sections(path.read_text(encoding="utf-8")) if path.is_file() else []
    heading = f"## {candidate.version} (YYYY-MM-DD)"
    hint = f"write the heading as {heading}, and commit"
    ours = next((section for section in found if section.version == candidate.version), None)
    if ours is None:
        return Check("changelog", False, f"{notes.NAME} has no section {candidate.version}", hint)
    if not _is_date(ours.date):
        said = f"{notes.NAME}: {candidate.version} has no date: ({ours.date})"
        return Check("changelog", False, said, hint)
    if not ours.text:
        said = f"{notes.NAME}: the section {candidate.version} is empty"
        return Check("changelog", False, said, "list what users notice")
    if found[0] is not ours:
        said = f"{notes.NAME}: {found[0].version} is above {candidate.version}"
        return Check("changelog", False, said, "put the newest release first")
    return Check("changelog", True, f"{candidate.version} of {ours.date}")


def _is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)) and bool(date.fromisoformat(text))
    except ValueError:
        return False


def _made(name: str, make: Callable[[], object], said: str) -> Check:
    """Return a check that passes where a function does not raise."""
    try:
        make()
    except SparkforgeError as error:
        return Check(name, False, error.what, error.remedy)
    return Check(name, True, said)


def _files(candidate: Candidate, built: Receipt) -> Check:
    name = "build"
    if built.pins_sha256 != sha256_file(candidate.pins_path):
        return Check(name, False, "pins.yaml has changed since the build", candidate.build)
    if not built.files:
        return Check(name, False, "the last build stopped before its wheels", candidate.build)
    try:
        problems = signing.sums(candidate.folder)
    except SparkforgeError as error:
        problems = [error.what]
    if problems:
        return Check(name, False, "; ".join(problems[:3]), candidate.build)
    return Check(name, True, f"{len(built.files)} files match receipt and checksums")


def _origin(candidate: Candidate, commit: str) -> Check:
    """Check that the provenance names this commit, or one whose build has the same inputs."""
    name, again = "provenance", f"rm {_shown(candidate.folder / receipt.NAME)}; {candidate.build}"
    statement = read_json(candidate.folder / PROVENANCE) or {}
    try:
        dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        ours = next(part for part in dependencies if part["name"] == "sparkforge")
        made, clean = str(ours["digest"]["gitCommit"]), bool(ours["annotations"]["clean"])
    except (LookupError, TypeError, StopIteration):
        return Check(name, False, "names no commit of this checkout", again)
    if not clean:
        said = f"was made at {made[:12]} with files that were not committed"
        return Check(name, False, said, again)
    if made == commit:
        return Check(name, True, f"names commit {made[:12]}")
    read = inputs(candidate.pins)
    if not commit or not git.git_ok(candidate.root, "diff", "--quiet", made, commit, "--", *read):
        said = f"names commit {made[:12]}, from which files of the build differ"
        return Check(name, False, said, again)
    return Check(name, True, f"names commit {made[:12]}, with the same files for the build")


def _smoke(candidate: Candidate, built: Receipt) -> Check:
    if candidate.pins.target(candidate.target).smoke is None:
        return Check("smoke test", True, f"target {candidate.target} has none (it needs its GPU)")
    if any(item.stage == "smoke" for item in built.items):
        return Check("smoke test", True, "passed")
    return Check("smoke test", False, "not run on this build", candidate.build)


def _shown(path: Path) -> str:
    """Return a path below dist/ as the hints have it."""
    return "/".join(path.parts[-3:])
