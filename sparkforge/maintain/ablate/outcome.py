"""The proof of a patch: a check must fail without it.

A check is patches' own tests, the smoke test, or a command (``checks.py``).
"""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.run import call, failure_text
from sparkforge.maintain.ablate.reduced import CHECKOUT, Place, Reduced

Verdict = Literal["noticed", "not noticed", "fails in any case", "not run", "broken"]

_MEANINGS: dict[Verdict, str] = {
    "noticed": "passes with the series, fails without the patch",
    "not noticed": "also passes without the patch: it proves nothing",
    "fails in any case": "fails even with the whole series",
    "not run": "was skipped: it proves nothing here",
    "broken": "failed for a reason inside sparkforge, not because of the patch",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check: a test with all its parameters, a smoke test, a command."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    message: str = ""
    """First line of the first failure."""
    ours: bool = False
    """A failure came from sparkforge itself: a build that broke, not a test that noticed."""

    def counts(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {name: value for name, value in asdict(self).items() if name != "ours"}


def run_tests(
    python: Path,
    root: Path,
    tests: Sequence[str],
    env: Mapping[str, str],
    work: Path,
    *,
    found: bool = False,
) -> dict[str, Outcome]:
    """Run tests by their node ids in the checkout ``root``; returns the outcome of each.

    Args:
        found: they ran before, with the whole series. A test file that can't be imported now needs
            what the patch adds; that is a failure of its tests, as any other.

    Raises:
        SeriesError: pytest finds no such test, or could not run at all.
    """
    report = work / "report.xml"
    report.unlink(missing_ok=True)
    done = call(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", root),
        *(f"--junitxml={report}", *dict.fromkeys(tests)),
        cwd=root,
        env=env,
        check=False,
    )
    cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    unread = {test: bad for test in tests if (bad := _unread(test, cases)) is not None}
    if found and unread:  # for which pytest runs nothing at all
        rest = [test for test in tests if test not in unread]
        ended = run_tests(python, root, rest, env, work, found=True) if rest else {}
        return {**ended, **{test: _failed(bad) for test, bad in unread.items()}}
    if done.returncode not in (0, 1) or not cases:
        msg = f"the tests did not run:\n{failure_text(done)}"
        raise SeriesError(msg, "check the patch's Test trailer and the test itself")
    return {test: _outcome(test, cases) for test in tests}


def _unread(test: str, cases: Sequence[ET.Element]) -> ET.Element | None:
    """Return the error with which a test's file could not be imported, where it could not."""
    module = _module(test)
    for case in cases:
        if not case.get("classname") and case.get("name") == module:
            bad = case.find("error")
            if bad is not None and bad.get("message") == "collection failure":
                return bad
    return None


def _failed(bad: ET.Element) -> Outcome:
    # the text of a collection error: its last line tells the exception
    told = re.findall(r"^E\s+(\S.*)$", bad.text or "", re.MULTILINE)
    message = str(told[-1]) if told else "its file cannot be imported"
    return Outcome(failed=1, message=message, ours="sparkforge.core.errors." in message)


def _module(test: str) -> str:
    return test.partition("::")[0].removesuffix(".py").replace("/", ".")


def _outcome(test: str, cases: Sequence[ET.Element]) -> Outcome:
    *classes, function = test.partition("::")[2].split("::")
    place = ".".join([_module(test), *classes])
    passed = failed = skipped = 0
    message, ours = "", False
    for case in cases:
        name = case.get("name", "")
        if case.get("classname") != place or function not in (name, name.partition("[")[0]):
            continue
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            failed += 1
            message = message or _gist(bad)
            ours = ours or "sparkforge.core.errors." in (bad.get("message") or "")
        elif any(child.tag == "skipped" for child in case):
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, failed, skipped, message, ours)


def _gist(bad: ET.Element) -> str:
    """Return the most useful line of a failure."""
    message = (bad.get("message") or "").removeprefix('failed on setup with "').strip()
    first = message.partition("\n")[0].strip()
    if first and not first.endswith(":"):
        return first
    # an assertion about a program's output: the last error that the program printed
    told = re.findall(r"^E\s+((?:\w+\.)*\w*(?:Error|Exception): .+)$", bad.text or "", re.MULTILINE)
    return str(told[-1]) if told else first or "no message"


def judge(whole: Outcome, without: Outcome) -> Verdict:
    """Return the verdict on a check from its two outcomes."""
    if whole.failed:
        return "broken" if whole.ours else "fails in any case"
    if not whole.passed:
        return "not run"
    if without.ours:
        return "broken"
    if without.failed:
        return "noticed"
    return "not noticed" if without.passed else "not run"


@dataclass(frozen=True)
class Result:
    """The result of one check of patches left out."""

    upstream: str
    patch: str
    """``upstream``, ``patch``: of the check; joined where several patches share it.
    """
    check: str
    """The test's node id, or the label of another check."""
    left_out: tuple[str, ...]
    """All patches that were to be left out."""
    dependents: tuple[str, ...]
    """Later patches that do not merge without those, left out, too."""
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
            "upstream": self.upstream,
            "patch": self.patch,
            "test": self.check,
            "left_out": list(self.left_out),
            "left_out_too": list(self.dependents),
            "verdict": self.verdict,
            "with_series": self.whole.counts(),
            "without_patch": self.without.counts(),
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True)
class OwnTests:
    """The check of each patch: the test of its trailer."""

    python: Path
    """Interpreter that has pytest."""
    root: Path
    """The checkout whose tests are run, whichever series they see."""
    tests: Mapping[tuple[str, str], str]
    """Node id by upstream and patch."""
    ran: bool = False
    """They are known to run with the series; a file that cannot be imported is a failure."""

    def whole(self, place: Place) -> dict[str, Outcome]:
        """Run all of them with the whole series, as CI does.

        Raises:
            UsageError: the tests are already pointed at another checkout.
            SeriesError: as ``run_tests``.
        """
        if CHECKOUT in os.environ:
            msg = f"{CHECKOUT} is set, so the tests would use another series than {self.root}"
            raise UsageError(msg, f"unset {CHECKOUT}")
        env = {"SPARKFORGE_STORE": str(place.store.root)}
        with place.store.temporary("report") as work:
            tests = list(self.tests.values())
            return run_tests(self.python, self.root, tests, env, work, found=self.ran)

    def without(self, place: Place, whole: Mapping[str, Outcome]) -> list[Result]:
        """Run those of the patches that a place lacks; a result a patch."""
        start = time.monotonic()
        asked = [(part, name) for part in place.reduced for name in part.left_out]
        tests = [self.tests[part.upstream, name] for part, name in asked]
        with place.store.temporary("report") as work:
            found = run_tests(self.python, self.root, tests, place.env, work, found=True)
        seconds = time.monotonic() - start
        return [
            Result(
                part.upstream,
                name,
                test,
                *missing(place.reduced),
                whole[test],
                found[test],
                seconds,
            )
            for (part, name), test in zip(asked, tests, strict=True)
        ]


def missing(reduced: Sequence[Reduced]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patches that were to be left out, and those that went with them."""
    return (
        tuple(name for part in reduced for name in part.left_out),
        tuple(name for part in reduced for name in part.dependents),
    )
