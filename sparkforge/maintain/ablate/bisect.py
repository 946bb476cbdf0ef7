"""``ablate --bisect``: the patch with which a command begins to fail, or to succeed.

Binary search over the prefixes of the series: the first N patches, in order, which apply as they
are even where patches need each other. The store keeps the results after each step, so an
interrupted or killed run continues where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparkforge.core import typed
from sparkforge.core.disk import read_json
from sparkforge.core.errors import AblationError, UsageError
from sparkforge.core.hashing import key_of
from sparkforge.core.log import counted, log
from sparkforge.maintain.ablate import reduced
from sparkforge.maintain.ablate.checks import Check
from sparkforge.maintain.ablate.job import Job
from sparkforge.maintain.ablate.reduced import Place

Answer = Literal["good", "bad", "skip"]
NONE, ALL = "none", "all"


def search(ends: tuple[int, int], ask: Callable[[int], Answer]) -> tuple[int, int]:
    """Return the two closest known prefixes between which the answer changes.

    Args:
        ends: prefixes, the shorter first, whose answers differ and are no ``skip``.
        ask: the answer of a prefix; asked once each.

    Between the two lie only prefixes that were skipped.
    """
    low, high = ends
    first = ask(low)
    skipped: set[int] = set()
    while between := [at for at in range(low + 1, high) if at not in skipped]:
        middle = min(between, key=lambda at: (abs(2 * at - low - high), at))
        answer = ask(middle)
        if answer == "skip":
            skipped.add(middle)
        elif answer == first:
            low = middle
        else:
            high = middle
    return low, high


@dataclass(frozen=True)
class Step:
    """The result of a prefix."""

    answer: Answer
    message: str
    """The reason, if the check gives one."""
    seconds: float


@dataclass
class Bisection:
    """A search, and its results so far."""

    job: Job
    check: Check
    identity: Mapping[str, Any]
    """All inputs of the check. With the series, the key by which a later run continues."""
    good: str | None = None
    bad: str | None = None
    """``good``, ``bad``: ends in the user's words: ``none``, ``all``, or the name of the last patch
    that is in; None: ask for the answer."""
    again: bool = False
    """Forget the results of an earlier run."""
    _known: dict[int, Step] = field(default_factory=dict)
    _resumed: dict[int, bool] = field(default_factory=dict)
    """``_known``, ``_resumed``: by prefix; the second in the order of this run, with whether an
    earlier one found the answer."""

    @property
    def patches(self) -> list[tuple[str, str]]:
        """Upstream and name of every patch, in the order in which they are added."""
        return [
            (series.upstream, patch.name) for series in self.job.series for patch in series.patches
        ]

    def run(self) -> int:
        """Find it, print it, return the exit code.

        Raises:
            UsageError: an end is no patch, or both are the same.
            AblationError: both ends give the same answer, or one gives none.
            CommandError: the command could not run.
        """
        if not self.patches:
            raise UsageError("no patches to bisect", "choose an upstream that has patches")
        ends = self._ends()
        job = self.job
        sources = {series.upstream: job.source(series.upstream).commit for series in job.series}
        key = key_of(
            {
                **self.identity,
                "sources": sources,
                "series": {series.upstream: series.sha256 for series in job.series},
            }
        )
        state = job.store.root / "bisect" / f"{key[:32]}.json"
        job.store.sweep()
        with job.store.lock(f"bisect-{key[:32]}"):
            if self.again:
                state.unlink(missing_ok=True)
            stored = read_json(state) or {}
            for at in range(len(self.patches) + 1):
                if (step := typed.load(Step, stored.get(str(at)))) is not None:
                    self._known[at] = step
            if self._known:
                known = counted(len(self._known), "known step")
                log.info(f"continuing with {known} (--again: from the start)")

            def ask(at: int) -> Answer:
                self._resumed[at] = at in self._known
                if self._resumed[at]:
                    log.info(f"{self._known[at].answer} with {self._name(at)}, known")
                else:
                    self._known[at] = self._ask(at)
                    found = {str(at): typed.as_json(step) for at, step in self._known.items()}
                    job.store.write_json(state, found)
                return self._known[at].answer

            answers = {at: ask(at) for at in ends}
            try:
                self._check_ends(answers)
                low, high = search(ends, lambda at: answers.get(at) or ask(at))
            except AblationError:
                state.unlink(missing_ok=True)  # the next run asks anew
                raise
            state.unlink(missing_ok=True)
        return self._conclude(answers[ends[0]], low, high)

    # -- ends -----------------------------------------------------------------------

    def _position(self, word: str) -> int:
        """Return the number of patches at an end, given in the user's words."""
        if word in (NONE, ALL):
            return 0 if word == NONE else len(self.patches)
        name = f"{word.removesuffix('.patch')}.patch"
        found = [at for at, (_, patch) in enumerate(self.patches, 1) if patch == name]
        if len(found) != 1:
            what = "no such patch" if not found else "several upstreams have this patch"
            raise UsageError(
                f"{name}: {what}",
                "none, all, or a name of build.py patches list"
                " (--upstream chooses among upstreams)",
            )
        return found[0]

    def _ends(self) -> tuple[int, int]:
        given = {
            at: word
            for word in (self.good, self.bad)
            if word is not None
            for at in (self._position(word),)
        }
        if len(given) < len([word for word in (self.good, self.bad) if word is not None]):
            msg = f"--good {self.good} and --bad {self.bad} are the same"
            raise UsageError(msg, "give two different ends")
        if len(given) == 2:
            return min(given), max(given)
        if not given:
            return 0, len(self.patches)
        (at,) = given
        # one end alone: the other is the far one; of the two outer ends, the opposite
        far_end = 0 if self.bad is not None and at > 0 else len(self.patches)
        if far_end == at:
            far_end = 0
        return min(at, far_end), max(at, far_end)

    def _check_ends(self, answers: Mapping[int, Answer]) -> None:
        (low, first), (high, last) = sorted(answers.items())
        told = f"with {self._name(low)} it is {first}, with {self._name(high)} {last}"
        for at, answer in answers.items():
            if answer == "skip":
                why = self._known[at].message
                msg = f"{self.check.label}: {self._name(at)} cannot be judged: {why}"
                raise AblationError(msg, "choose another end: --good, --bad")
        if first == last:
            msg = f"{self.check.label}: {told}: no patch makes a difference"
            raise AblationError(
                msg, "try the command by hand at both ends; exit code 0 is good, 1 is bad"
            )
        for word, meant in ((self.good, "good"), (self.bad, "bad")):
            if word is not None and answers[self._position(word)] != meant:
                msg = f"{self.check.label}: {told}, but --{meant} {word} was given"
                raise AblationError(msg, "swap --good and --bad, or fix the command")

    # -- steps ------------------------------------------------------------------------

    def _name(self, at: int) -> str:
        if at == 0:
            return "no patch"
        if at == len(self.patches):
            return "the whole series"
        return f"{at} patches, up to {self.patches[at - 1][1]}"

    def _ask(self, at: int) -> Step:
        start = time.monotonic()
        with log.step(f"with {self._name(at)}"), ExitStack() as stack:
            outcome = self.check.run(self._place(at, stack))
            answer: Answer = "good" if outcome.passed else "bad"
            if outcome.skipped or outcome.ours:  # a failed build is no answer
                answer = "skip"
            log.info(answer + (f": {outcome.message}" if outcome.message else ""))
        return Step(answer, outcome.message, round(time.monotonic() - start, 1))

    def _place(self, at: int, stack: ExitStack) -> Place:
        job = self.job
        if at == len(self.patches):
            return job.whole([series.upstream for series in job.series])
        left, parts = at, []
        for series in job.series:
            count = min(left, len(series.patches))
            left -= count
            parts.append(reduced.prefix(job.store, series, job.source(series.upstream), count))
        cut = [part for part in parts if part.left_out]
        place = stack.enter_context(reduced.checkout(job.store, job.root, cut))
        return Place(place.root, place.store, tuple(parts))  # whole series have trees, too

    # -- the end ------------------------------------------------------------------------

    def _conclude(self, first: Answer, low: int, high: int) -> int:
        what = "breaks" if first == "good" else "mends"
        verb = "breaks" if first == "good" else "fixes"
        candidates = self.patches[low:high]
        listed = [{"upstream": upstream, "patch": name} for upstream, name in candidates]
        log.document(
            {
                "bisect": {
                    "what": what,
                    "found": listed[0] if len(listed) == 1 else None,
                    "candidates": listed,
                    "steps": [
                        {
                            "patches": at,
                            "last": self.patches[at - 1][1] if at else None,
                            "resumed": resumed,
                            **asdict(self._known[at]),
                        }
                        for at, resumed in self._resumed.items()
                    ],
                }
            }
        )
        if len(candidates) == 1:
            ((upstream, name),) = candidates
            log.heading(f"{upstream}: {name} {verb} {self.check.label}")
            return 0
        names = ", ".join(name for _, name in candidates)
        msg = f"one of {len(candidates)} patches {verb} {self.check.label}: {names}"
        remedy = "no step between them gave a result: see the steps that say skip"
        return log.failure(AblationError(msg, remedy))
