"""Compare two results test by test: the ratio of their means, with an interval and a verdict.

Ratios are of geometric means. Their intervals have 95 % confidence, by Student's t on the
logarithms of the samples. If the rounds of both took turns in one session, it uses the differences
within each round, else Welch's test for two independent sets. A bootstrap needs more samples: three
give ten different means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkforge.core.errors import BenchError
from sparkforge.inspect import intervals
from sparkforge.inspect.bench.result import Result
from sparkforge.inspect.bench.samples import HIGHER_IS_BETTER, METRICS, Metric, Samples
from sparkforge.inspect.intervals import Estimate

_Pair = tuple[Samples, Samples]
Verdict = Literal["faster", "slower", "same", "unclear"]
TOLERANCE = 0.03
"""Smaller changes do not count."""


@dataclass(frozen=True)
class Change:
    """The change of one test, or of all tests of a metric.

    Attributes:
        name: of the test; "all tests" for the mean of them.
        before, after: geometric means; 0 over all tests.
        ratio: of B to A; ``low`` and ``high``: its interval, infinite where there are too few
            samples for one.
        paired: by rounds.
    """

    name: str
    metric: Metric
    before: float
    after: float
    ratio: float
    low: float
    high: float
    paired: bool
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All changes, and the tests without a partner.

    Attributes:
        differs: differences other than the build, as sentences.
    """

    changes: tuple[Change, ...]
    only_in_one: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        """The regressions."""
        return tuple(change for change in self.changes if change.verdict == "slower")


def _welch(before: Sequence[float], after: Sequence[float]) -> Estimate:
    difference = statistics.fmean(after) - statistics.fmean(before)
    if min(len(before), len(after)) < 2:
        return Estimate(difference, 0.0, 0.0)
    parts = [
        (statistics.variance(values) / len(values), len(values) - 1) for values in (before, after)
    ]
    variance = sum(part for part, _ in parts)
    return Estimate(difference, variance, _satterthwaite(parts))


def _satterthwaite(parts: Iterable[tuple[float, float]]) -> float:
    """Return the degrees of freedom of a sum of variances, each with its own."""
    found = list(parts)
    total = sum(part for part, _ in found)
    spread = sum(part**2 / freedom for part, freedom in found)
    return total**2 / spread if spread > 0 else min(freedom for _, freedom in found)


def _by_round(before: Samples, after: Samples) -> list[float | None]:
    """Return the difference of the mean logarithms in each round; None where one has no sample."""
    return [
        statistics.fmean([math.log(value) for value in b])
        - statistics.fmean([math.log(value) for value in a])
        if a and b
        else None
        for a, b in zip(before.rounds, after.rounds, strict=False)
    ]


def _present(differences: Iterable[float | None]) -> list[float]:
    return [difference for difference in differences if difference is not None]


def _estimate(pair: _Pair, *, paired: bool) -> Estimate:
    if paired and (found := _present(_by_round(*pair))):
        return intervals.of_pairs(found)
    return _welch(*([math.log(value) for value in side.values] for side in pair))


def _over_all(pairs: Sequence[_Pair], *, paired: bool) -> Estimate:
    """Return the mean of the tests' estimates.

    In rounds it is that of each round's mean: all tests of a round share the effect of the server's
    start. Otherwise the tests' errors count as independent.
    """
    if paired:
        rounds = map(_present, zip(*(_by_round(*pair) for pair in pairs), strict=False))
        if found := [statistics.fmean(differences) for differences in rounds if differences]:
            return intervals.of_pairs(found)
    estimates = [_estimate(pair, paired=False) for pair in pairs]
    count = len(estimates)
    value = statistics.fmean([estimate.value for estimate in estimates])
    if any(estimate.freedom < 1 for estimate in estimates):
        return Estimate(value, 0.0, 0.0)
    parts = [(estimate.variance / count**2, estimate.freedom) for estimate in estimates]
    return Estimate(value, sum(part for part, _ in parts), _satterthwaite(parts))


def verdict(metric: Metric, low: float, high: float, tolerance: float) -> Verdict:
    """Return the verdict about the interval of a ratio.

    ``faster`` and ``slower``: the whole interval is beyond the tolerance. ``same``: all of it is
    within. Anything else needs more runs.
    """
    if not HIGHER_IS_BETTER[metric]:
        low, high = 1 / high if high else math.inf, 1 / low if low else math.inf
    if high < 1 - tolerance:
        return "slower"
    if low > 1 + tolerance:
        return "faster"
    return "same" if low >= 1 - tolerance and high <= 1 + tolerance else "unclear"


def _change(
    name: str,
    metric: Metric,
    means: tuple[float, float],
    estimate: Estimate,
    *,
    paired: bool,
    tolerance: float,
) -> Change:
    low, high = (math.exp(end) for end in estimate.interval())
    said = verdict(metric, low, high, tolerance)
    return Change(name, metric, *means, math.exp(estimate.value), low, high, paired, said)


def compare(before: Result, after: Result, tolerance: float = TOLERANCE) -> Comparison:
    """Compare B with A.

    Args:
        tolerance: smallest change that counts, as a share.

    Raises:
        BenchError: they have no test in common.
    """
    ours = {samples.key: samples for samples in before.samples}
    theirs = {samples.key: samples for samples in after.samples}
    common = [key for key in ours if key in theirs]
    if not common:
        msg = "the two results have no test in common"
        raise BenchError(msg, "measure both with the same --profile-table")
    paired = before.session == after.session and min(before.rounds, after.rounds) > 1
    changes: list[Change] = []
    pairs: dict[Metric, list[_Pair]] = {}
    for key in common:
        old, new = ours[key], theirs[key]
        found = _estimate((old, new), paired=paired)
        pairs.setdefault(old.metric, []).append((old, new))
        means = tuple(
            math.exp(statistics.fmean([math.log(v) for v in side.values])) for side in (old, new)
        )
        changes.append(
            _change(
                old.name,
                old.metric,
                (means[0], means[1]),
                found,
                paired=paired,
                tolerance=tolerance,
            )
        )
    for metric, several in pairs.items():
        if len(several) > 1:
            changes.append(
                _change(
                    "all tests",
                    metric,
                    (0.0, 0.0),
                    _over_all(several, paired=paired),
                    paired=paired,
                    tolerance=tolerance,
                )
            )
    alone = [samples for key, samples in (ours | theirs).items() if key not in common]
    names = dict.fromkeys(f"{samples.name}: {METRICS[samples.metric]}" for samples in alone)
    return Comparison(tuple(changes), tuple(names), tuple(_differences(before, after)))


def _differences(before: Result, after: Result) -> Iterable[str]:
    """Yield differences that make two results less comparable."""
    pairs: Mapping[str, tuple[object, object]] = {
        "machine": (before.machine, after.machine),
        "llama-benchy's requirements": (before.lock, after.lock),
        "text": (before.text, after.text),
    }
    for name, (old, new) in pairs.items():
        if old != new:
            yield f"{name} differs"
    if before.session == after.session:
        return  # two sides of one run: the rest depends on the build
    a, b = before.identity, after.identity
    served: Mapping[str, tuple[object, object]] = {
        "target": (a.target, b.target),
        "model": (a.model, b.model),
        "checkpoint": (a.checkpoint, b.checkpoint),
        "profile": (a.profile, b.profile),
        "context": (a.context, b.context),
        "command line": (a.options, b.options),
    }
    for name, (old, new) in served.items():
        known = (old and new) or a.origin == b.origin  # little is known of a server by URL
        if old != new and known:
            yield f"{name} differs: {_words(old)}, {_words(new)}"


def _words(value: object) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value or "")
    return text or "none"


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the changes as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "metric", "A", "B", "B / A", "95 %", "verdict")]
    for change in comparison.changes:
        values = ("", "") if not change.before else (f"{change.before:.2f}", f"{change.after:.2f}")
        interval = (
            f"{change.low:.3f} to {change.high:.3f}"
            if change.high < math.inf
            else "too few samples"
        )
        rows.append(
            (
                change.name,
                METRICS[change.metric],
                *values,
                f"{change.ratio:.3f}",
                interval,
                change.verdict,
            )
        )
    return rows
