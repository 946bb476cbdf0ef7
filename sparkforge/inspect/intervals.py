"""Intervals by ranks, which assume no distribution, and an exact test of changed answers.

An interval goes from the K-th smallest to the K-th largest estimate, with K by the normal
approximation (Campbell and Gardner, BMJ 1988;296:1454). Its confidence is 95 %, and less for fewer
than four values a side or six differences: then it has all estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, median

_Z = NormalDist().inv_cdf(0.975)


def _ranked(estimates: Iterable[float], mean: float, variance: float) -> tuple[float, float, float]:
    """Return median, lower and upper end, from mean and variance of the estimates' ranks."""
    found = sorted(estimates)
    left_out = max(0, round(mean - _Z * math.sqrt(variance)) - 1)
    return median(found), found[left_out], found[-1 - left_out]


def of_ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two independent samples, with its interval (Mann and Whitney)."""
    n, m = len(before), len(after)
    ratios = (b / a for a in before for b in after)
    return _ranked(ratios, n * m / 2, n * m * (n + m + 1) / 12)


def of_differences(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the middle of differences within pairs, with its interval (Wilcoxon).

    A single one has an infinite interval.
    """
    if (n := len(values)) < 2:
        return values[0], -math.inf, math.inf
    means = ((a + b) / 2 for at, a in enumerate(values) for b in values[at:])
    return _ranked(means, n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24)


def chance_to_lose(lost: int, gained: int) -> float:
    """Return the probability of at least so many losses, if losses and gains are equally likely.

    McNemar's exact test, one-sided.
    """
    changed = lost + gained
    chances = (math.comb(changed, count) / 2**changed for count in range(lost, changed + 1))
    return math.fsum(chances)
