"""The proof of a patch's test: leave the patch out, and the test must fail.

A series without one of its patches is made by a three-way merge of the later ones; those that do
not merge are left out, too, and named. The reduced series, with pins that record its tree, stands
in a checkout of its own, and the tests get it through two variables:

    SPARKFORGE_CHECKOUT   whose pins.yaml and patches/ they shall use (tests/patches/checkout.py)
    SPARKFORGE_STORE      a store that borrows downloads, sources and wheelhouses, and is thrown
                          away with what was made of the reduced series
"""

from __future__ import annotations

import os
import re
import shutil
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkforge import git, pins, series
from sparkforge.errors import CommandError, SeriesError, UsageError
from sparkforge.pins import Recorded
from sparkforge.run import call, failure_text
from sparkforge.series import Patched, Series
from sparkforge.sources import Source
from sparkforge.store import Store

CHECKOUT = "SPARKFORGE_CHECKOUT"
Verdict = Literal["noticed", "not noticed", "fails in any case", "not run", "broken"]

_MEANINGS: dict[Verdict, str] = {
    "noticed": "passes with the series, fails without the patch",
    "not noticed": "passes without the patch, too: it proves nothing about it",
    "fails in any case": "does not even pass with the whole series",
    "not run": "was skipped, so that it proves nothing here",
    "broken": "ended for a reason of sparkforge's own, not of the patch",
}


# -- a series without one patch ------------------------------------------------------


@dataclass(frozen=True)
class Reduced:
    """A series without one patch and those that need its lines.

    Attributes:
        commit, tree: what it gives on the source.
        files: name and bytes of each patch left, in order, in canonical form.
        dependents: later patches that do not merge without it.
    """

    commit: str
    tree: str
    files: tuple[tuple[str, bytes], ...]
    dependents: tuple[str, ...]


def reduce(store: Store, whole: Series, source: Source, name: str) -> Reduced:
    """Return a series without one of its patches.

    Raises:
        SeriesError: the series does not apply, or has no such patch.
    """
    names = [patch.name for patch in whole.patches]
    if name not in names:
        raise SeriesError(f"{whole.folder}: has no patch {name}", "see build.py patches list")
    # its commits hold the blobs that a three-way merge starts from
    series.apply(store, whole, source)
    paths = [entry.path for patch in whole.patches for entry in patch.entries]
    dependents = []
    with (
        store.temporary("ablate") as work,
        git.sparse_worktree(source.repo, work / "tree", source.commit, paths) as tree,
    ):
        for patch in whole.patches:
            if patch.name != name and not _picked(tree, patch.path):
                dependents.append(patch.name)
        commit = git.git(tree, "rev-parse", "HEAD")
        files = series.export(source.repo, source.commit, commit)
    final = git.git(source.repo, "rev-parse", f"{commit}^{{tree}}")
    return Reduced(commit, final, tuple(files), tuple(dependents))


def _picked(tree: Path, patch: Path) -> bool:
    """Apply one patch as a commit; False, and nothing changed, where it does not merge."""
    before = git.git(tree, "rev-parse", "HEAD")
    try:
        git.git(
            tree, "am", "--quiet", "--keep-non-patch", "--keep-cr", "--3way",
            "--committer-date-is-author-date", "--no-gpg-sign", str(patch.resolve()),
        )  # fmt: skip
    except CommandError:
        git.git(tree, "am", "--abort")
        return False
    return git.git(tree, "rev-parse", "HEAD") != before  # nothing of it may be left


@contextmanager
def checkout(
    store: Store, root: Path, upstream: str, source: Source, reduced: Reduced
) -> Iterator[dict[str, str]]:
    """Give the variables under which tests see the reduced series in place of the whole.

    Raises:
        SeriesError: the reduced series does not apply as it should.
    """
    with store.temporary("ablate") as work:
        here = work / "checkout"
        here.mkdir()
        for path in root.iterdir():
            if path.name not in ("pins.yaml", "patches", "dist") and path.name[0] != ".":
                (here / path.name).symlink_to(path)
        shutil.copytree(root / "patches", here / "patches")
        folder = here / "patches" / upstream
        shutil.rmtree(folder)
        folder.mkdir()
        for name, data in reduced.files:
            (folder / name).write_bytes(data)
        (folder / "series").write_text("".join(f"{name}\n" for name, _ in reduced.files))
        shutil.copyfile(root / "pins.yaml", here / "pins.yaml")
        pins.forget(here / "pins.yaml", upstream)
        remade = series.read(folder)
        borrowed = store.borrowed(work / "store")
        if remade.patches:
            made = series.apply(borrowed, remade, source)
            _check_same(made, reduced)
            recorded = Recorded(commit=made.commit, tree=made.tree)
            pins.record(here / "pins.yaml", upstream, source.provider, recorded)
        try:
            yield {CHECKOUT: str(here), "SPARKFORGE_STORE": str(borrowed.root)}
        finally:
            series.forget(remade, source)


def _check_same(made: Patched, reduced: Reduced) -> None:
    if made.tree != reduced.tree:
        msg = f"the reduced series gives tree {made.tree}, its commits {reduced.tree}"
        raise SeriesError(msg, "report this as a bug of sparkforge")


# -- tests -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How one test (all its parameters together) ended.

    Attributes:
        message: first line of the first failure.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    message: str = ""
    ours: bool = False
    """A failure came from sparkforge itself: a build that broke, not a test that noticed."""


def run_tests(
    python: Path, root: Path, tests: Sequence[str], env: dict[str, str], work: Path
) -> dict[str, Outcome]:
    """Run tests by their node ids in the checkout ``root``; returns how each ended.

    Raises:
        SeriesError: pytest finds no such test, or could not run at all.
    """
    report = work / "report.xml"
    report.unlink(missing_ok=True)
    done = call(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", root,
        f"--junitxml={report}", *dict.fromkeys(tests), cwd=root, env=env, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1) or not report.exists():
        msg = f"the tests could not be run:\n{failure_text(done)}"
        raise SeriesError(msg, "check the trailer Test of the patch, and the test itself")
    cases = list(ET.parse(report).getroot().iter("testcase"))
    return {test: _outcome(test, cases) for test in tests}


def _outcome(test: str, cases: Sequence[ET.Element]) -> Outcome:
    file, _, inside = test.partition("::")
    *classes, function = inside.split("::")
    place = ".".join([file.removesuffix(".py").replace("/", "."), *classes])
    passed = failed = skipped = 0
    message, ours = "", False
    for case in cases:
        name = case.get("name", "")
        if case.get("classname") != place or function not in (name, name.partition("[")[0]):
            continue
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        if bad is not None:
            failed += 1
            message = message or _gist(bad)
            ours = ours or "sparkforge.errors." in (bad.get("message") or "")
        elif any(one.tag == "skipped" for one in case):
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, failed, skipped, message, ours)


def _gist(bad: ET.Element) -> str:
    """Return the line of a failure that says most."""
    said = (bad.get("message") or "").removeprefix('failed on setup with "').strip()
    first = said.partition("\n")[0].strip()
    if first and not first.endswith(":"):
        return first
    # an assertion about a program's output: the last error that the program told of
    told = re.findall(r"^E\s+((?:\w+\.)*\w*(?:Error|Exception): .+)$", bad.text or "", re.MULTILINE)
    return str(told[-1]) if told else first or "no message"


def judge(whole: Outcome, without: Outcome) -> Verdict:
    """Return what a test's two outcomes say about it."""
    if whole.failed:
        return "broken" if whole.ours else "fails in any case"
    if not whole.passed:
        return "not run"
    if without.ours:
        return "broken"
    if without.failed:
        return "noticed"
    return "not noticed" if without.passed else "not run"


# -- all together ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What was found about one patch's test."""

    upstream: str
    patch: str
    test: str
    dependents: tuple[str, ...]
    whole: Outcome
    without: Outcome
    seconds: float

    @property
    def verdict(self) -> Verdict:
        return judge(self.whole, self.without)

    @property
    def meaning(self) -> str:
        return _MEANINGS[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "upstream": self.upstream, "patch": self.patch, "test": self.test,
            "left_out_too": list(self.dependents), "verdict": self.verdict,
            "with_series": _counts(self.whole), "without_patch": _counts(self.without),
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


def _counts(outcome: Outcome) -> dict[str, Any]:
    return {"passed": outcome.passed, "failed": outcome.failed, "skipped": outcome.skipped,
            "message": outcome.message}  # fmt: skip


def one(
    store: Store, root: Path, whole: Series, source: Source, name: str, python: Path,
    outcome: Outcome,
) -> Result:  # fmt: skip
    """Leave one patch out and run its test.

    Args:
        outcome: how the test ended with the whole series.

    Raises:
        SeriesError: the reduced series or the test can't be made to run.
    """
    start = time.monotonic()
    test = next(patch.trailers["Test"] for patch in whole.patches if patch.name == name)
    reduced = reduce(store, whole, source, name)
    with (
        checkout(store, root, whole.upstream, source, reduced) as env,
        store.temporary("report") as work,
    ):
        without = run_tests(python, root, [test], env, work)[test]
    seconds = time.monotonic() - start
    return Result(whole.upstream, name, test, reduced.dependents, outcome, without, seconds)


def baseline(store: Store, root: Path, chosen: Sequence[str], python: Path) -> dict[str, Outcome]:
    """Run tests with the whole series, as CI does.

    Raises:
        UsageError: the tests are already pointed at another checkout.
        SeriesError: as ``run_tests``.
    """
    env = {"SPARKFORGE_STORE": str(store.root)}
    if CHECKOUT in os.environ:
        msg = f"{CHECKOUT} is set: the whole series would not be the one of {root}"
        raise UsageError(msg, f"unset {CHECKOUT}")
    with store.temporary("report") as work:
        return run_tests(python, root, chosen, env, work)
