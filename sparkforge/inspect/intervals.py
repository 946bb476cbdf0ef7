"""An interval by ranks, and an exact test of changed answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def of_differences(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of differences within pairs (Wilcoxon), by its normal approximation.

    It is infinite for a single one, and has all of fewer than six.
    """
    if (n := len(values)) < 2:
        return -math.inf, math.inf
    means = sorted((a + b) / 2 for at, a in enumerate(values) for b in values[at:])
    z = statistics.NormalDist().inv_cdf(0.975)
    rank = n * (n + 1) / 4 - z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    left_out = max(0, round(rank) - 1)
    return means[left_out], means[-1 - left_out]


def chance_to_lose(lost: int, gained: int) -> float:
    """Return the probability of at least so many losses, if losses and gains are equally likely.

    McNemar's exact test, one-sided.
    """
    changed = lost + gained
    chances = (math.comb(changed, count) / 2**changed for count in range(lost, changed + 1))
    return math.fsum(chances)
