"""Intervals of means by Student's t, and an exact test of changed answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, 97.5 %, by degrees of freedom from 1 (any book of statistics)
_TABLE = """
12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228
2.201 2.179 2.160 2.145 2.131 2.120 2.110 2.101 2.093 2.086
2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042
"""
_T = tuple(map(float, _TABLE.split()))
_NORMAL = 1.960


@dataclass(frozen=True)
class Estimate:
    """An estimate of a mean.

    Attributes:
        variance: of the estimate.
        freedom: degrees of freedom; below 1: there is no interval.
    """

    value: float
    variance: float
    freedom: float

    def interval(self) -> tuple[float, float]:
        """Return the ends of its 95 % interval, infinite without degrees of freedom."""
        if self.freedom < 1:
            return -math.inf, math.inf
        half = student(self.freedom) * math.sqrt(self.variance)
        return self.value - half, self.value + half


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, infinite below one degree of freedom.

    A fraction counts as the whole number below it, which makes the interval wider. Beyond the table
    it is the normal's with the first term of Fisher's expansion, correct to 0.2 %.
    """
    if freedom < 1:
        return math.inf
    if freedom < len(_T) + 1:
        return _T[int(freedom) - 1]
    return _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)


def of_pairs(differences: Sequence[float]) -> Estimate:
    """Return the mean of differences within pairs; one pair has no interval."""
    count = len(differences)
    if count < 2:
        return Estimate(statistics.fmean(differences), 0.0, 0.0)
    variance = statistics.variance(differences) / count
    return Estimate(statistics.fmean(differences), variance, count - 1)


def chance_to_lose(lost: int, gained: int) -> float:
    """Return the probability of at least so many losses, if losses and gains are equally likely.

    McNemar's exact test, one-sided.
    """
    changed = lost + gained
    chances = (math.comb(changed, count) / 2**changed for count in range(lost, changed + 1))
    return math.fsum(chances)
