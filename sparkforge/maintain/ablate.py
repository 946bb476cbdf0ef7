"""``ablate``: each patch's test must pass with the series, and fail without the patch.

A series with patches left out is in a temporary checkout with a temporary store. Tests find them by
SPARKFORGE_CHECKOUT (tests/patches/checkout.py) and SPARKFORGE_STORE.
"""

import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from sparkforge.build.options import OutputOptions, chosen_series, command_options
from sparkforge.core import git
from sparkforge.core.errors import CheckError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call, failure
from sparkforge.pins import pins, yamlfile
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, series
from sparkforge.series.patchfile import Patch
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions

CHECKOUT = "SPARKFORGE_CHECKOUT"
_JUDGED = {"fails": "noticed", "passes": "not noticed", "skipped": "not run", "broken": "broken"}


@command_options
class Options:
    patch: tuple[str, ...] = field(default=(), kw_only=False)
    """patches to leave out, one at a time (default: each)"""
    python: Path | None = None
    """Python with pytest (default: .venv-dev, created if missing)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test with all its parameters."""

    result: Literal["passes", "fails", "skipped", "broken", "missing"]
    """Broken: sparkforge itself failed, in a build perhaps; no test noticed anything."""
    message: str = ""
    """First line of the first failure."""


def run(options: Options = Options()) -> int:
    """Leave patches out, one at a time, and run their tests; returns the exit code."""
    project = Project.open(options.project)
    every = chosen_series(None, project.root, project.pins)
    project.store.sweep()
    known = {patch.name for own in every for patch in own.patches}
    names = {f"{name.removesuffix('.patch')}.patch" for name in options.patch} or known
    if unknown := sorted(names - known):
        raise UsageError(f"{', '.join(unknown)}: no such patch", "see build.py patches list")
    python = options.python or dev_python(project.root)
    chosen = [(own, patch) for own in every for patch in own.patches if patch.name in names]
    tests = [test_of(patch) for _, patch in chosen]
    with log.step("the whole series"):
        whole = run_tests(python, project, tests)
    results, rows, bad = [], [("patch", "its test", "left out, too", "verdict")], []
    for (own, patch), test in zip(chosen, tests, strict=True):
        place = f"{own.upstream}: {patch.name}"
        full, cut, dependents = whole[test], Outcome("skipped"), list[str]()
        if full.result == "passes":  # else it says nothing without the patch, either
            with (
                log.step(f"without {patch.name}"),
                _without(project, own, patch.name) as (here, dependents),
            ):
                cut = run_tests(python, project, [test], here)[test]
        verdict = _JUDGED[cut.result if full.result == "passes" else full.result]
        verdict = "fails in any case" if full.result == "fails" else verdict
        log.info(f"{place}: {verdict}")
        found = {"upstream": own.upstream, "patch": patch.name, "test": test, "verdict": verdict}
        outcomes = {"whole": asdict(full), "without": asdict(cut), "dependents": dependents}
        results.append(found | outcomes)
        rows.append((place, test, ", ".join(dependents) or "-", verdict))
        if verdict != "noticed":
            bad.append(f"{place}: {test}: {verdict}: {full.message or cut.message}")
    log.document({"ablate": results})
    log.table(rows)
    for text in bad:
        log.error(text)
    return CheckError.exit_code if bad else 0


def test_of(patch: Patch) -> str:
    """Return the node id of a patch's test; SeriesError: it has none."""
    if not (test := patch.trailers.get("Test")):
        raise SeriesError(f"{patch.path}: has no test", "see build.py patches check")
    return test


def dev_python(root: Path) -> Path:
    """Return the interpreter of a checkout's own tests, made where it is missing."""
    from build import ensure_environment  # the file next to this package

    return ensure_environment(root / ".venv-dev", root / "requirements" / "dev.txt")


def run_tests(
    python: Path, project: Project, tests: Sequence[str], reduced: Project | None = None
) -> dict[str, Outcome]:
    """Run a checkout's tests by their node ids; returns the outcome of each.

    ``reduced``: a checkout without some patches, which the tests look at instead.
    """
    if not tests:
        return {}
    seen = reduced or project
    with project.store.temporary("report") as work:
        report = work / "report.xml"
        done = call(
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", project.root),
            *("--continue-on-collection-errors", f"--junitxml={report}", *dict.fromkeys(tests)),
            cwd=project.root,
            env={CHECKOUT: str(seen.root), "SPARKFORGE_STORE": str(seen.store.root)},
            check=False,
        )
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    lost = {case.get("name") for case in cases if not case.get("classname")}
    rest = [test for test in tests if test.partition(".py::")[0].replace("/", ".") not in lost]
    if len(rest) < len(tests):  # then pytest ran none of them
        found = dict.fromkeys(tests, Outcome("fails", "its file cannot be imported"))
        return found | run_tests(python, project, rest, reduced)
    found = {test: _outcome(test, cases) for test in tests}
    if missing := [test for test, outcome in found.items() if outcome.result == "missing"]:
        msg = f"{missing[0]}: did not run:\n{failure(done).what}"
        raise SeriesError(msg, "check the patch's Test trailer and the test itself")
    return found


def _outcome(test: str, cases: Sequence[ET.Element]) -> Outcome:
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
    return Outcome("passes" if passed else "skipped" if mine else "missing")


@contextmanager
def _without(project: Project, whole: Series, name: str) -> Iterator[tuple[Project, list[str]]]:
    """Make a checkout whose series lacks a patch; the later ones are merged (three-way).

    With it comes which later patches do not merge.
    """
    root, store, upstream = project.root, project.store, whole.upstream
    pinned = project.pins.upstream(upstream)
    source = sources.ensure(store, upstream, pinned, RELEASE_PLAN, project.access)
    last = series.apply(store, whole, source).commit
    commits = git.git(source.repo, "rev-list", "--reverse", f"{source.commit}..{last}").split()
    at = [patch.name for patch in whole.patches].index(name)
    start, paths = [source.commit, *commits][at], {e.path for p in whole.patches for e in p.entries}
    dependents = []
    with store.temporary("ablate") as work:
        with (
            series.writing(store, source),
            git.sparse_worktree(source.repo, work / "tree", start, paths) as tree,
        ):
            for patch, commit in zip(whole.patches[at + 1 :], commits[at + 1 :], strict=True):
                if git.attempt(tree, "cherry-pick", "--no-gpg-sign", commit)[0]:
                    git.git(tree, "cherry-pick", "--abort")
                    dependents.append(patch.name)
            commit, result = git.git(tree, "rev-parse", "HEAD", "HEAD^{tree}").split()
        here = work / "checkout"
        here.mkdir()
        for path in root.iterdir():
            if path.name not in ("pins.yaml", "patches", "dist") and path.name[0] != ".":
                (here / path.name).symlink_to(path)
        shutil.copytree(root / "patches", here / "patches")
        own_pins = Path(shutil.copyfile(root / "pins.yaml", here / "pins.yaml"))
        # borrows downloads, sources and wheelhouses
        borrowed = store.borrowed(work / "store")
        files = series.export(source.repo, source.commit, commit)
        fresh = exporting.stage(borrowed, here / "patches" / upstream, files, source, result)
        try:
            recorded = {source.provider: fresh.recorded} if fresh.recorded else {}
            yamlfile.record(own_pins, upstream, recorded)
            new = replace(project, pins_path=own_pins, pins=pins.load(own_pins), store=borrowed)
            yield new, dependents
        finally:
            series.forget(borrowed, fresh.series, source)
