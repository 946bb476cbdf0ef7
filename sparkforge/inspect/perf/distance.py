"""The distance of one server's next-token distributions from another's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SMALLEST = 1e-6  # probability; a smaller remainder is rounding of the others

Logprobs = Mapping[int, float]
"""Natural logarithms of the probabilities of the likeliest tokens, by token id."""


@dataclass(frozen=True)
class Distance:
    """The distance of one server's distributions from another's, over positions.

    Attributes:
        mean_kl: Kullback-Leibler divergence in nats; a lower bound, close if ``covered`` is near
            one, see ``divergence``.
        p99_kl: the same at the 99th percentile of positions.
        agreement: share of positions with the same likeliest token.
        nll_change: mean change of -log p of the scored token, in nats.
        covered: mean probability of the tokens returned by both.
        positions: number of compared positions.
        kl_by_text, agreement_by_text: means of each text; positions of one text are not
            independent observations.
    """

    mean_kl: float
    p99_kl: float
    agreement: float
    nll_change: float
    covered: float
    positions: int
    kl_by_text: tuple[float, ...]
    agreement_by_text: tuple[float, ...]


def divergence(reference: Logprobs, other: Logprobs) -> tuple[float, float]:
    """Return a lower bound of one position's divergence in nats, and the probability it covers.

    The servers only return their likeliest tokens. The result is the larger of two bounds. One
    merges all tokens that only one server returns. The other takes each token that only the
    reference returns separately: the other server's probability of it is at most that of its last
    but one returned token (the last may be the scored one, which is always returned), and at most
    the rest.
    """
    shared = reference.keys() & other.keys()
    covered = sum(math.exp(reference[token]) for token in shared)
    both = sum(math.exp(reference[t]) * (reference[t] - other[t]) for t in shared)
    left = 1 - sum(math.exp(other[token]) for token in shared)
    as_one = both + _merged(1 - covered, left)
    least = sorted(other.values())[:2][-1]
    most = min(math.exp(least), 1 - sum(math.exp(q) for q in other.values()))
    log_most = math.log(max(most, _SMALLEST))
    single = sum(math.exp(p) * (p - log_most) for t, p in reference.items() if t not in shared)
    unnamed = 1 - sum(math.exp(p) for p in reference.values())
    return max(as_one, both + single + _merged(unnamed, left), 0.0), min(covered, 1.0)


def _merged(p: float, q: float) -> float:
    """Return the term of many tokens merged, with probabilities p and at most q."""
    return p * math.log(p / max(q, _SMALLEST)) if p > _SMALLEST else 0.0


def distance(
    tokens: Sequence[Sequence[int]],
    reference: Sequence[Sequence[Logprobs]],
    other: Sequence[Sequence[Logprobs]],
) -> Distance:
    """Compare two servers' distributions over the same texts.

    Args:
        tokens: of each text, the scored token at each position.
    """
    kls: list[list[float]] = []
    same: list[list[bool]] = []
    covered, changes = [], []
    for text, ours, theirs in zip(tokens, reference, other, strict=True):
        kls.append([])
        same.append([])
        for token, p, q in zip(text, ours, theirs, strict=True):
            kl, mass = divergence(p, q)
            kls[-1].append(kl)
            covered.append(mass)
            same[-1].append(max(p, key=p.__getitem__) == max(q, key=q.__getitem__))
            changes.append(p[token] - q[token])
    every = sorted(kl for text in kls for kl in text)
    count = len(every)
    return Distance(
        mean_kl=statistics.fmean(every),
        p99_kl=every[math.ceil(0.99 * count) - 1],
        agreement=sum(map(sum, same)) / count,
        nll_change=statistics.fmean(changes),
        covered=statistics.fmean(covered),
        positions=count,
        kl_by_text=tuple(map(statistics.fmean, kls)),
        agreement_by_text=tuple(map(statistics.fmean, same)),
    )
