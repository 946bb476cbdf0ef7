"""The tests of a series that has landed on another release: each patch's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.errors import AblationError
from sparkforge.core.log import log
from sparkforge.maintain.ablate.job import dev_python
from sparkforge.maintain.ablate.outcome import Outcome, run_tests
from sparkforge.maintain.rebase.state import State
from sparkforge.series import series
from sparkforge.store.store import Store


@dataclass(frozen=True)
class Tested:
    """The result of a patch's own test on the new release."""

    upstream: str
    patch: str
    test: str
    outcome: Outcome

    @property
    def ending(self) -> str:
        """The outcome in one or two words."""
        if self.outcome.failed:
            return "FAILED"
        return "passed" if self.outcome.passed else "skipped: it proves nothing here"

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        names = {"upstream": self.upstream, "patch": self.patch, "test": self.test}
        return names | self.outcome.counts()


def run(root: Path, store: Store, state: State) -> list[Tested]:
    """Run the tests that the moved patches name, in the present checkout.

    Raises:
        SeriesError: pytest finds no such test, or can't run at all.
    """
    named = [
        (part.upstream, patch.name, patch.trailers["Test"])
        for part in state.parts
        for patch in series.read(root / "patches" / part.upstream).patches
    ]
    if not named:
        return []
    env = {"SPARKFORGE_STORE": str(store.root)}
    with log.step("the patches' own tests"), store.temporary("report") as work:
        tests = [test for _, _, test in named]
        ended = run_tests(dev_python(root), root, tests, env, work)
    outcomes = [Tested(upstream, patch, test, ended[test]) for upstream, patch, test in named]
    rows = (
        (
            tested.patch.removesuffix(".patch"),
            f"{tested.ending} {tested.outcome.message}".rstrip(),
        )
        for tested in outcomes
    )
    log.table([("patch", "its test"), *rows])
    return outcomes


def verdict(outcomes: Sequence[Tested]) -> int:
    """Return the exit code: 0, or that of a patch whose test did not pass."""
    failed = [tested for tested in outcomes if tested.outcome.failed]
    for tested in failed:
        log.error(f"{tested.upstream}: {tested.patch}: {tested.test} fails on the new release")
    return AblationError.exit_code if failed else 0
