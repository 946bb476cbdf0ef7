"""How far two servers' next-token distributions are apart, by their likeliest tokens."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_SMALLEST = 1e-6  # probability; a smaller remainder is rounding of the others

Logprobs = Mapping[int, float]
"""Natural logarithms of the probabilities of the likeliest tokens, by token id."""


def divergence(reference: Logprobs, other: Logprobs) -> tuple[float, float]:
    """Return a lower bound of one position's divergence in nats, and the probability it covers.

    Tokens that not both servers return are merged to one, which can only lose divergence.
    """
    shared = reference.keys() & other.keys()
    covered = sum(math.exp(reference[token]) for token in shared)
    both = sum(math.exp(reference[t]) * (reference[t] - other[t]) for t in shared)
    rest, left = 1 - covered, 1 - sum(math.exp(other[token]) for token in shared)
    merged = rest * math.log(rest / max(left, _SMALLEST)) if rest > _SMALLEST else 0.0
    return max(both + merged, 0.0), min(covered, 1.0)


def measured(reference: Sequence[Logprobs], seen: Sequence[Logprobs]) -> dict[str, Any]:
    """Compare one server's distributions with the unchanged model's.

    Returns ``mean_kl`` in nats, a lower bound; ``agreement``: share of positions with the same
    likeliest token; ``covered``: mean probability of the tokens that both returned (near one, the
    bound is close); and the number of ``positions``.
    """
    pairs = list(zip(reference, seen, strict=True))
    kls, covered = zip(*(divergence(p, q) for p, q in pairs), strict=True)
    same = fmean(max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs)
    found = {"mean_kl": fmean(kls), "agreement": same, "covered": fmean(covered)}
    return {**found, "positions": len(pairs)}
