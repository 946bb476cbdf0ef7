"""The command ``ablate``: which patches, in which order, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge import ablate
from sparkforge.ablate import Result
from sparkforge.errors import AblationError, SeriesError, UsageError
from sparkforge.log import log
from sparkforge.series import Series
from sparkforge.sources import Source
from sparkforge.store import Store

_HEAD = ("patch", "with the series", "without it", "left out, too", "seconds", "verdict")


@dataclass(frozen=True)
class Job:
    """What to ablate, and the means.

    Attributes:
        python: interpreter that has pytest; None: the checkout's own, made where missing.
        names: of patch files, with or without ``.patch``; empty: all.
        source_of: gives an upstream's source by its name.
    """

    root: Path
    store: Store
    python: Path | None
    series: Sequence[Series]
    names: tuple[str, ...]
    source_of: Callable[[str], Source]


def run(job: Job, *, as_json: bool) -> int:
    """Ablate, print the table, return the exit code.

    Raises:
        UsageError: there is no patch of such a name.
        SeriesError: a test can't be run at all.
    """
    chosen = _chosen(job)
    if not chosen:
        log.info("no patches, nothing to leave out")
    job.store.sweep()
    results = _results(job, chosen)
    if as_json:
        log.json({"ablate": [result.as_json() for result in results]})
    log.table([_HEAD, *(_cells(result) for result in results)] if results else [])
    bad = [result for result in results if result.verdict != "noticed"]
    for result in bad:
        what = f"{result.upstream}: {result.patch}: {result.test} {result.meaning}"
        message = result.whole.message or result.without.message
        log.error(f"{what}: {message}" if message else what)
    return AblationError.exit_code if bad else 0


def _chosen(job: Job) -> list[tuple[Series, str]]:
    every = [(one, patch.name) for one in job.series for patch in one.patches]
    wanted = {f"{name.removesuffix('.patch')}.patch" for name in job.names}
    unknown = wanted - {name for _, name in every}
    if unknown:
        msg = f"{', '.join(sorted(unknown))}: no such patch"
        raise UsageError(msg, "build.py patches list shows them")
    return [(one, name) for one, name in every if not wanted or name in wanted]


def _results(job: Job, chosen: Sequence[tuple[Series, str]]) -> list[Result]:
    if not chosen:
        return []
    patches = [patch for one in job.series for patch in one.patches if (one, patch.name) in chosen]
    if nameless := [str(patch.path) for patch in patches if not patch.trailers.get("Test")]:
        msg = f"{', '.join(nameless)}: names no test"
        raise SeriesError(msg, "add the trailer Test to the last paragraph")
    tests = {patch.name: patch.trailers["Test"] for patch in patches}
    python = job.python or _dev_python(job.root)
    with log.step("the whole series"):
        before = ablate.baseline(job.store, job.root, list(tests.values()), python)
    results = []
    for one, name in chosen:
        with log.step(f"without {name}"):
            result = ablate.one(
                job.store, job.root, one, job.source_of(one.upstream), name, python,
                before[tests[name]],
            )  # fmt: skip
            log.info(result.verdict + (f": {result.without.message}" if result.without.failed
                                       else ""))  # fmt: skip
        results.append(result)
    return results


def _dev_python(root: Path) -> Path:
    from build import ensure_environment  # the file beside this package

    return ensure_environment(root / ".venv-dev", root / "requirements" / "dev.txt")


def _cells(result: Result) -> tuple[str, ...]:
    def said(outcome: ablate.Outcome) -> str:
        parts = (("passed", outcome.passed), ("failed", outcome.failed),
                 ("skipped", outcome.skipped))  # fmt: skip
        return ", ".join(f"{count} {word}" for word, count in parts if count) or "nothing"

    return (
        f"{result.upstream}: {result.patch.removesuffix('.patch')}", said(result.whole),
        said(result.without), ", ".join(result.dependents) or "-", f"{result.seconds:.0f}",
        result.verdict,
    )  # fmt: skip
