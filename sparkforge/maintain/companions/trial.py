"""The trial of a move in a throw-away checkout: targets are built, and the patches' tests run."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from sparkforge.build.context import STAGES
from sparkforge.build.options import chosen_series
from sparkforge.core.errors import RebaseStopped
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.maintain.ablate import job
from sparkforge.maintain.ablate.job import Job
from sparkforge.maintain.ablate.outcome import OwnTests, Result
from sparkforge.sources.project import ROOT, Project

HEAD = ("patch", "its test", "without all patches")


@dataclass(frozen=True)
class Built:
    """A build that succeeded."""

    command: str
    seconds: float


@dataclass(frozen=True)
class Tried:
    """A trial that nothing failed in."""

    builds: tuple[Built, ...]
    tests: tuple[Result, ...]

    @property
    def taken(self) -> tuple[Result, ...]:
        """The patches that the new release does not need: their tests pass without any."""
        return tuple(result for result in self.tests if result.verdict == "not noticed")


def run(here: Project, moved: Collection[str]) -> Tried:
    """Build the targets of upstreams that moved, and run their patches' tests.

    Args:
        here: the throw-away checkout.

    Raises:
        RebaseStopped: a build or a test fails.
    """
    built = tuple(_built(here, target) for target in _targets(here, moved))
    tests = tuple(_tested(here, moved))
    log.table([HEAD, *map(row, tests)] if tests else [])
    failed = [result for result in tests if result.whole.failed]
    if failed:
        lines = [
            f"{one.upstream}: {one.patch}: {one.check} fails on the new release:"
            f" {one.whole.message}"
            for one in failed
        ]
        raise RebaseStopped("\n".join(lines), _remedy(here))
    return Tried(built, tests)


def row(result: Result) -> tuple[str, str, str]:
    """Return a patch's test as a row of a table."""
    name = result.patch.removesuffix(".patch")
    if result.whole.failed:
        taken = result.without.passed and not result.without.failed
        return (name, f"FAILS: {result.whole.message}", "passes" if taken else "fails, too")
    if not result.whole.passed:
        return (name, "skipped: it proves nothing here", "-")
    without = {
        "noticed": "fails, as it must",
        "not noticed": "passes: upstream has it",
        "not run": "skipped",
        "broken": f"could not run: {result.without.message}",
    }
    return (name, "passes", without[result.verdict])


def _targets(here: Project, moved: Collection[str]) -> list[str]:
    return [
        name
        for name, plan in here.pins.targets.items()
        if {*plan.wheels, *(c for wheel in plan.wheels.values() for c in wheel.carries)} & {*moved}
    ]


def _built(here: Project, target: str) -> Built:
    """Build a target as far as any machine can: with a smoke test where it has one."""
    start = time.monotonic()
    whole = here.pins.targets[target].smoke is not None
    words = ["--target", target, "--engine", "none", "--until", STAGES[-1] if whole else "wheels"]
    places = ["--pins", str(here.pins_path), "--store", str(here.store.root)]
    command = f"build.py {shlex.join(words)}"
    # the code of that checkout, where it has any
    env = {} if (here.root / "sparkforge").is_dir() else {"PYTHONPATH": str(ROOT)}
    with log.step(f"{command}, in the throw-away checkout"):
        words = ["-m", "sparkforge", "build", *words, *places]
        done = call(sys.executable, *words, cwd=here.root, env=env, stream=True, check=False)
        if done.returncode:
            msg = f"{command} ends with {done.returncode} on the new release: see above"
            raise RebaseStopped(msg, _remedy(here))
    return Built(command, time.monotonic() - start)


def _tested(here: Project, moved: Collection[str]) -> list[Result]:
    every = chosen_series(None, here.root, here.pins)
    chosen = [series for series in every if series.upstream in moved and series.patches]
    if not chosen:
        return []
    tests = {
        (series.upstream, patch.name): patch.trailers["Test"]
        for series in chosen
        for patch in series.patches
    }
    python = job.dev_python(here.root)
    checks = OwnTests(python, here.root, tests, ran=True)
    # at once: one run without patches instead of one for each
    return job.results_of(Job(here, python, chosen, (), together=True, checks=checks))


def _remedy(here: Project) -> str:
    trees = here.root.parent
    return (
        f"fix the test in your checkout, or amend the patch's commit in {trees}/tree (another"
        " upstream's: tree-NAME); then --continue; or --abort"
    )
