"""What has to hold before a build is released: one row a check; a failed one has a hint."""

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
from sparkforge.inspect.verify.command import INPUTS
from sparkforge.pins.pins import Pins
from sparkforge.release import notes

_NOT_BUILT = "no build of {}"


@dataclass(frozen=True)
class Check:
    """A row.

    Attributes:
        said: what was found.
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


def tagged(one: Candidate) -> str:
    """Return the commit of the release's tag, or "" if there is none."""
    ref = f"refs/tags/{one.tag}^{{commit}}"
    code, found = git.attempt(one.root, "rev-parse", "--verify", "--quiet", ref)
    return found.strip() if code == 0 else ""


def receipt_of(one: Candidate) -> Receipt | None:
    """Return the receipt of the last build; None if there is none."""
    return receipt.load(one.folder / receipt.NAME)


def built_image(one: Candidate) -> ImageResult | None:
    """Return the image of the last build; None if it has none.

    Raises:
        UsageError: another version of sparkforge wrote the receipt.
    """
    built = receipt_of(one)
    return None if built is None else built.image


def check(one: Candidate) -> Iterator[Check]:
    """Yield the result of each check; cheap ones first."""
    commit = git.head(one.root)
    yield from _checkout(one, commit)
    yield _changelog(one)
    yield _made("pages", one.pages, "generated pages agree with pins and patches")
    built = receipt_of(one)
    if built is None:
        yield Check("build", False, _NOT_BUILT.format(one.target), one.build)
        return
    yield _files(one, built)
    yield _origin(one, commit)
    yield _smoke(one, built)
    yield _made("report", one.page, "can be made")


def _checkout(one: Candidate, commit: str) -> Iterator[Check]:
    if not commit:
        yield Check("checkout", False, f"{one.root}: no git repository", "release from a clone")
        return
    changed = git.git(one.root, "status", "--porcelain", "--untracked-files=normal").splitlines()
    said = f"clean, commit {commit[:12]}"
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        said = f"not committed: {', '.join(line[3:] for line in changed[:3])}{more}"
    yield Check("checkout", not changed, said, "commit or remove these files, then build again")
    free = tagged(one) in ("", commit)
    yield Check(
        "version",
        free,
        f"{one.version}" + ("" if free else f": tag {one.tag} is another commit"),
        "raise release.counter in pins.yaml",
    )


def _changelog(one: Candidate) -> Check:
    path = one.root / notes.NAME
    found = notes.sections(path.read_text(encoding="utf-8")) if path.is_file() else []
    heading = f"## {one.version} (YYYY-MM-DD)"
    hint = f"write the heading as {heading}, and commit"
    ours = next((section for section in found if section.version == one.version), None)
    if ours is None:
        return Check("changelog", False, f"{notes.NAME} has no section {one.version}", hint)
    if not _is_date(ours.date):
        said = f"{notes.NAME}: {one.version} has no date: ({ours.date})"
        return Check("changelog", False, said, hint)
    if not ours.text:
        said = f"{notes.NAME}: the section {one.version} is empty"
        return Check("changelog", False, said, "list what users notice")
    if found[0] is not ours:
        said = f"{notes.NAME}: {found[0].version} is above {one.version}"
        return Check("changelog", False, said, "put the newest release first")
    return Check("changelog", True, f"{one.version} of {ours.date}")


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


def _files(one: Candidate, built: Receipt) -> Check:
    name = "build"
    if built.pins_sha256 != sha256_file(one.pins_path):
        return Check(name, False, "pins.yaml has changed since the build", one.build)
    if not built.files:
        return Check(name, False, "the last build stopped before its wheels", one.build)
    try:
        problems = signing.sums(one.folder)
    except SparkforgeError as error:
        problems = [error.what]
    if problems:
        return Check(name, False, "; ".join(problems[:3]), one.build)
    return Check(name, True, f"{len(built.files)} files match receipt and checksums")


def _origin(one: Candidate, commit: str) -> Check:
    """Check that the provenance names this commit, or one whose build has the same inputs."""
    name, again = "provenance", f"rm {_shown(one.folder / receipt.NAME)}; {one.build}"
    statement = read_json(one.folder / PROVENANCE) or {}
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
    if not commit or not git.git_ok(one.root, "diff", "--quiet", made, commit, "--", *INPUTS):
        said = f"names commit {made[:12]}, from which files of the build differ"
        return Check(name, False, said, again)
    return Check(name, True, f"names commit {made[:12]}, with the same files for the build")


def _smoke(one: Candidate, built: Receipt) -> Check:
    if one.pins.target(one.target).smoke is None:
        return Check("smoke test", True, f"target {one.target} has none (it needs its GPU)")
    if any(item.stage == "smoke" for item in built.items):
        return Check("smoke test", True, "passed")
    return Check("smoke test", False, "not run on this build", one.build)


def _shown(path: Path) -> str:
    """Return a path below dist/ as the hints have it."""
    return "/".join(path.parts[-3:])
