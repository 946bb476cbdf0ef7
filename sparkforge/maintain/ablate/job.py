"""The command ``ablate``: the choice and order of patches, and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sparkforge.core.errors import AblationError, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.ablate import outcome, parts, reduced
from sparkforge.maintain.ablate.outcome import Outcome, OwnTests, Result
from sparkforge.maintain.ablate.reduced import Place, Reduced
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

_HEAD = ("patch", "with the series", "without it", "left out, too", "seconds", "verdict")


class Checks(Protocol):
    """Checks that run once with the whole series, and once without patches."""

    def whole(self, place: Place) -> dict[str, Outcome]: ...

    def without(self, place: Place, whole: Mapping[str, Outcome]) -> list[Result]: ...


@dataclass(frozen=True)
class Job:
    """The patches to ablate, and the means."""

    project: Project
    python: Path | None
    """Interpreter that has pytest; None: the checkout's own, made where missing."""
    series: Sequence[Series]
    names: tuple[str, ...]
    """Of patch files, with or without ``.patch``; empty: all."""
    together: bool = False
    """They are left out at once, not each in turn."""
    checks: Checks | None = None
    """The checks to run; None: each patch's own test."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Parts of the plugin to switch off, each with its test."""
    _sources: dict[str, Source] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return self.project.store

    @property
    def root(self) -> Path:
        return self.project.root

    def source(self, upstream: str) -> Source:
        """Return an upstream's source; asked for once."""
        if upstream not in self._sources:
            pinned, access = self.project.pins.upstream(upstream), self.project.access
            self._sources[upstream] = sources.ensure(
                self.store, upstream, pinned, RELEASE_PLAN, access
            )
        return self._sources[upstream]

    def whole(self, upstreams: Sequence[str]) -> Place:
        """Return the checkout as it is, with the whole series of some upstreams."""
        return Place(
            self.root,
            self.store,
            tuple(
                reduced.prefix(
                    self.store, series, self.source(series.upstream), len(series.patches)
                )
                for series in self.series
                if series.upstream in upstreams
            ),
        )


Group = Mapping[str, tuple[str, ...]]
"""Patches to be left out together, by upstream."""


def run(job: Job) -> int:
    """Ablate, print the table, return the exit code.

    Raises:
        UsageError: there is no patch of such a name.
        SeriesError: a test can't be run at all.
    """
    if not _groups(job) and not job.parts:
        log.info("no patches to leave out")
    job.store.sweep()
    results = results_of(job)
    if job.parts:
        python = job.python or dev_python(job.root)
        results += parts.results_of(job.whole(()), python, job.parts)
    log.document({"ablate": [result.as_json() for result in results]})
    log.table([_HEAD, *(_cells(result) for result in results)] if results else [])
    bad = [result for result in results if result.verdict != "noticed"]
    for result in bad:
        what = f"{result.upstream}: {result.patch}: {result.check} {result.meaning}"
        message = result.whole.message or result.without.message
        log.error(f"{what}: {message}" if message else what)
    return AblationError.exit_code if bad else 0


def merge(job: Job) -> int:
    """Report whether the remaining patches merge, and no more; returns the exit code.

    Raises:
        UsageError: there is no patch of such a name.
    """
    job.store.sweep()
    document, stuck = [], False
    for group in _groups(job):
        left = _reduce(job, group)
        left_out, dependents = outcome.missing(left)
        stuck = stuck or bool(dependents)
        document.append(
            {
                "left_out": list(left_out),
                "left_out_too": list(dependents),
                "trees": {part.upstream: part.tree for part in left},
            }
        )
        merges = f"{', '.join(dependents)} does not merge" if dependents else "the rest merges"
        log.info(f"without {', '.join(left_out)}: {merges}")
    log.document({"merge": document})
    return AblationError.exit_code if stuck else 0


def _groups(job: Job) -> list[Group]:
    every = [(series.upstream, patch.name) for series in job.series for patch in series.patches]
    wanted = {f"{name.removesuffix('.patch')}.patch" for name in job.names}
    unknown = wanted - {name for _, name in every}
    if unknown:
        msg = f"{', '.join(sorted(unknown))}: no such patch"
        raise UsageError(msg, "see build.py patches list, and docs/plugin.md for the parts")
    chosen = [(up, name) for up, name in every if not wanted or name in wanted]
    if not job.together:
        return [{up: (name,)} for up, name in chosen]
    ups = dict.fromkeys(up for up, _ in chosen)
    return (
        [{up: tuple(name for upstream, name in chosen if upstream == up) for up in ups}]
        if ups
        else []
    )


def _reduce(job: Job, group: Group) -> list[Reduced]:
    return [
        reduced.without(job.store, series, job.source(series.upstream), group[series.upstream])
        for series in job.series
        if series.upstream in group
    ]


def results_of(job: Job) -> list[Result]:
    """Ablate and return the results; none where there is no patch."""
    groups = _groups(job)
    if not groups:
        return []
    checks = job.checks or _own_tests(job, groups)
    with log.step("the whole series"):
        before = checks.whole(
            job.whole(list(dict.fromkeys(up for group in groups for up in group)))
        )
    results = []
    for group in groups:
        names = [name for part in group.values() for name in part]
        with log.step(f"without {', '.join(names)}"):
            left = _reduce(job, group)
            if dependents := outcome.missing(left)[1]:
                log.info(f"does not merge without it, left out, too: {', '.join(dependents)}")
            with reduced.checkout(job.store, job.root, left) as place:
                found = checks.without(place, before)
            for result in found:
                message = result.without.message if result.without.failed else ""
                log.info(result.verdict + (f": {message}" if message else ""))
        results += found
    return results


def _own_tests(job: Job, groups: Sequence[Group]) -> OwnTests:
    patches = {
        (series.upstream, patch.name): patch
        for series in job.series
        for patch in series.patches
        if any(patch.name in group.get(series.upstream, ()) for group in groups)
    }
    nameless = [str(patch.path) for patch in patches.values() if not patch.trailers.get("Test")]
    if nameless:
        msg = f"{', '.join(nameless)}: has no test"
        raise SeriesError(msg, "add the trailer Test to the last paragraph")
    tests = {key: patch.trailers["Test"] for key, patch in patches.items()}
    return OwnTests(job.python or dev_python(job.root), job.root, tests)


def dev_python(root: Path) -> Path:
    """Return the interpreter of a checkout's own tests, made where it is missing."""
    from build import ensure_environment  # the file next to this package

    return ensure_environment(root / ".venv-dev", root / "requirements" / "dev.txt")


def _cells(result: Result) -> tuple[str, ...]:
    def described(outcome: Outcome) -> str:
        counts = (
            ("passed", outcome.passed),
            ("failed", outcome.failed),
            ("skipped", outcome.skipped),
        )
        return ", ".join(f"{count} {word}" for word, count in counts if count) or "nothing"

    return (
        f"{result.upstream}: {result.patch.removesuffix('.patch')}",
        described(result.whole),
        described(result.without),
        ", ".join(result.dependents) or "-",
        f"{result.seconds:.0f}",
        result.verdict,
    )


def as_list(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas; UsageError if there is none in it."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError(f"--without {text!r}: gives no patch", "see build.py patches list")
    return names
