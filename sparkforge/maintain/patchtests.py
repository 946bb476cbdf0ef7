"""The tests of patches: each must pass with its patch, and fail without it."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.run import call, failure
from sparkforge.maintain import reduced
from sparkforge.sources.project import Project

Verdict = Literal["noticed", "not noticed", "fails in any case", "not run", "broken"]
MEANINGS: Mapping[Verdict, str] = {
    "noticed": "passes with the series, fails without the patch",
    "not noticed": "also passes without the patch: it proves nothing",
    "fails in any case": "fails even with the whole series",
    "not run": "was skipped: it proves nothing here",
    "broken": "failed for a reason inside sparkforge, not because of the patch",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test with all its parameters."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    message: str = ""
    """First line of the first failure."""
    ours: bool = False
    """A failure came from sparkforge itself: a build that broke, not a test that noticed."""


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
    def verdict(self) -> Verdict:
        return judge(self.whole, self.without)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "verdict": self.verdict}


def judge(whole: Outcome, without: Outcome) -> Verdict:
    """Return the verdict on a test from its two outcomes."""
    if whole.failed:
        return "broken" if whole.ours else "fails in any case"
    if not whole.passed:
        return "not run"
    if without.ours:
        return "broken"
    if without.failed:
        return "noticed"
    return "not noticed" if without.passed else "not run"


def run(
    python: Path,
    project: Project,
    tests: Sequence[str],
    env: Mapping[str, str],
    *,
    cut: bool = False,
) -> dict[str, Outcome]:
    """Run tests by their node ids in a checkout; returns the outcome of each.

    Args:
        cut: they ran before, with the whole series. One whose file cannot be imported now needs
            what a patch adds: that is a failure as any other.

    Raises:
        UsageError: the tests are already pointed at another checkout.
        SeriesError: pytest finds no such test, or could not run at all.
    """
    if reduced.CHECKOUT in os.environ:
        msg = f"{reduced.CHECKOUT} is set: the tests would use another series than {project.root}"
        raise UsageError(msg, f"unset {reduced.CHECKOUT}")
    with project.store.temporary("report") as work:
        report = work / "report.xml"
        done = call(
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", project.root),
            *("--continue-on-collection-errors", f"--junitxml={report}", *dict.fromkeys(tests)),
            cwd=project.root,
            env={"SPARKFORGE_STORE": str(project.store.root), **env},
            check=False,
        )
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    found = {test: _outcome(test, cases) for test in tests}
    if lost := [test for test, one in found.items() if one is None and not (cut and cases)]:
        msg = f"{', '.join(lost)}: did not run:\n{failure(done).what}"
        raise SeriesError(msg, "check the patch's Test trailer and the test itself")
    missing = Outcome(failed=1, message="its file cannot be imported")
    return {test: missing if one is None else one for test, one in found.items()}


def _outcome(test: str, cases: Sequence[ET.Element]) -> Outcome | None:
    """Return the outcome of a test in pytest's report; None: it is not there."""
    place, _, function = test.replace(".py::", "::").replace("/", ".").rpartition("::")
    mine = [
        case
        for case in cases
        if case.get("classname") == place.replace("::", ".")
        and function in (case.get("name"), case.get("name", "").partition("[")[0])
    ]
    if not mine:
        return None
    bad = [child for case in mine for child in case if child.tag in ("failure", "error")]
    skipped = sum(any(child.tag == "skipped" for child in case) for case in mine)
    failed = sum(any(child.tag in ("failure", "error") for child in case) for case in mine)
    ours = any("sparkforge.core.errors." in (one.get("message") or "") for one in bad)
    message = _gist(bad[0]) if bad else ""
    return Outcome(len(mine) - failed - skipped, failed, skipped, message, ours)


def _gist(bad: ET.Element) -> str:
    """Return the most useful line of a failure."""
    first = (bad.get("message") or "").partition("\n")[0].strip()
    if first and not first.endswith(":"):
        return first
    # an assertion about a program's output: the last error that the program printed
    told = re.findall(r"^E\s+((?:\w+\.)*\w*(?:Error|Exception): .+)$", bad.text or "", re.MULTILINE)
    return str(told[-1]) if told else first or "no message"


def dev_python(root: Path) -> Path:
    """Return the interpreter of a checkout's own tests, made where it is missing."""
    from build import ensure_environment  # the file next to this package

    return ensure_environment(root / ".venv-dev", root / "requirements" / "dev.txt")
