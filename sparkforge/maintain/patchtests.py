"""The tests of patches: each must pass with its patch, and fail without it.

A series with patches left out is in a temporary checkout with a temporary store. Tests and commands
find them by SPARKFORGE_CHECKOUT (tests/patches/checkout.py) and SPARKFORGE_STORE.
"""

import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparkforge.core import git
from sparkforge.core.errors import SeriesError
from sparkforge.core.run import call, failure
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source

CHECKOUT = "SPARKFORGE_CHECKOUT"
_JUDGED = {"fails": "noticed", "passes": "not noticed", "skipped": "not run", "broken": "broken"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test with all its parameters."""

    result: Literal["passes", "fails", "skipped", "broken"]
    """Broken: sparkforge itself failed, in a build perhaps; no test noticed anything."""
    message: str = ""
    """First line of the first failure."""


@dataclass(frozen=True)
class Result:
    """A patch's test, with and without the patch."""

    upstream: str
    patch: str
    test: str
    """Its node id."""
    whole: Outcome
    without: Outcome
    dependents: tuple[str, ...] = ()
    """Later patches that do not merge without it, left out, too."""

    @property
    def verdict(self) -> str:
        if self.whole.result == "fails":
            return "fails in any case"
        passed = self.whole.result == "passes"
        return _JUDGED[self.without.result if passed else self.whole.result]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "verdict": self.verdict}


def run(
    python: Path,
    project: Project,
    tests: Sequence[str],
    reduced: Project | None = None,
) -> dict[str, Outcome]:
    """Run a checkout's tests by their node ids; returns the outcome of each.

    ``reduced``: a checkout without some patches, which the tests look at instead.
    """
    found: dict[str, Outcome] = {}
    with project.store.temporary("report") as work:
        report = work / "report.xml"
        done = call(
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", project.root),
            *("--continue-on-collection-errors", f"--junitxml={report}", *dict.fromkeys(tests)),
            cwd=project.root,
            env=variables(reduced or project),
            check=False,
        )
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    lost = {case.get("name") for case in cases if not case.get("classname")}
    rest = [test for test in tests if test.partition(".py::")[0].replace("/", ".") not in lost]
    if len(rest) < len(tests):  # then pytest ran none of them
        found = dict.fromkeys(tests, Outcome("fails", "its file cannot be imported"))
        return found | (run(python, project, rest, reduced) if rest else {})
    for test in tests:
        outcome = _outcome(test, cases)
        if outcome is None:
            msg = f"{test}: did not run:\n{failure(done).what}"
            raise SeriesError(msg, "check the patch's Test trailer and the test itself")
        found[test] = outcome
    return found


def _outcome(test: str, cases: Sequence[ET.Element]) -> Outcome | None:
    """Return the outcome of a test by its node id; None: it is not among them."""
    place, _, function = test.replace(".py::", "::").replace("/", ".").rpartition("::")
    mine = [
        {child.tag: child.get("message") or "" for child in case}
        for case in cases
        if case.get("classname") == place.replace("::", ".")
        and function in (case.get("name"), case.get("name", "").partition("[")[0])
    ]
    bad = [case[tag] for case in mine for tag in ("failure", "error") if tag in case]
    if bad:
        ours = any("sparkforge.core.errors." in message for message in bad)
        return Outcome("broken" if ours else "fails", bad[0].partition("\n")[0])
    passed = any("skipped" not in case for case in mine)
    return Outcome("passes" if passed else "skipped") if mine else None


def dev_python(root: Path) -> Path:
    """Return the interpreter of a checkout's own tests, made where it is missing."""
    from build import ensure_environment  # the file next to this package

    return ensure_environment(root / ".venv-dev", root / "requirements" / "dev.txt")


# -- series with patches left out ------------------------------------------------------------------


@dataclass(frozen=True)
class Reduced:
    """A series without some of its patches."""

    source: Source
    commit: str
    """Its result on the source."""
    dependents: tuple[str, ...] = ()
    """Later patches that do not merge without those that were left out."""


def prefixes(project: Project, whole: Series) -> list[Reduced]:
    """Return the series without all of its patches, with the first one, and so on."""
    pinned = project.pins.upstream(whole.upstream)
    source = sources.ensure(project.store, whole.upstream, pinned, RELEASE_PLAN, project.access)
    last = series.apply(project.store, whole, source).commit
    commits = git.git(source.repo, "rev-list", "--reverse", f"{source.commit}..{last}").split()
    return [Reduced(source, commit) for commit in (source.commit, *commits)]


def without(project: Project, whole: Series, name: str) -> Reduced:
    """Return a series without one of its patches; the later ones are merged (three-way)."""
    store, every = project.store, prefixes(project, whole)
    at = [patch.name for patch in whole.patches].index(name)
    source, paths = every[at].source, {e.path for patch in whole.patches for e in patch.entries}
    dependents = []
    with (
        series.writing(store, source),
        store.temporary("ablate") as work,
        git.sparse_worktree(source.repo, work / "tree", every[at].commit, paths) as tree,
    ):
        for patch, whole_one in zip(whole.patches[at + 1 :], every[at + 2 :], strict=True):
            if git.attempt(tree, "cherry-pick", "--no-gpg-sign", whole_one.commit)[0]:
                git.git(tree, "cherry-pick", "--abort")
                dependents.append(patch.name)
        return Reduced(source, git.git(tree, "rev-parse", "HEAD"), tuple(dependents))


@contextmanager
def checkout(project: Project, reduced: Sequence[Reduced]) -> Iterator[Project]:
    """Make a checkout that has reduced series instead of the whole ones."""
    root, store = project.root, project.store
    staged: list[tuple[Series, Source]] = []
    with store.temporary("ablate") as work:
        here = work / "checkout"
        here.mkdir()
        for path in root.iterdir():
            if path.name not in ("pins.yaml", "patches", "dist") and path.name[0] != ".":
                (here / path.name).symlink_to(path)
        shutil.copytree(root / "patches", here / "patches")
        shutil.copyfile(root / "pins.yaml", here / "pins.yaml")
        # borrows downloads, sources and wheelhouses
        borrowed = store.borrowed(work / "store")
        try:
            for part in reduced:
                source, folder = part.source, here / "patches" / part.source.upstream
                files = series.export(source.repo, source.commit, part.commit)
                tree = git.git(source.repo, "rev-parse", f"{part.commit}^{{tree}}")
                fresh = exporting.stage(borrowed, folder, files, source, tree)
                staged.append((fresh.series, source))
                recorded = {source.provider: fresh.recorded} if fresh.recorded else {}
                yamlfile.record(here / "pins.yaml", source.upstream, recorded)
            path = here / "pins.yaml"
            yield replace(project, pins_path=path, pins=pins.load(path), store=borrowed)
        finally:
            for fresh_series, source in staged:
                series.forget(borrowed, fresh_series, source)


def variables(project: Project) -> dict[str, str]:
    """Return the variables by which tests and commands find a checkout."""
    return {CHECKOUT: str(project.root), "SPARKFORGE_STORE": str(project.store.root)}
