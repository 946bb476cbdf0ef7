"""Losses of quantised layers: distances of distributions, compared with the noise of one model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkforge.core import plain

_CHANCE = 0.025  # of so many losses between equals; the worse side of Student's 95 % is the same
_SMALLEST = 1e-6  # probability; a smaller remainder is rounding of the others
# Student's t, 97.5 %, for 1 to 10 degrees of freedom; beyond: Fisher's expansion, correct to 1.5 %
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Logprobs = Mapping[int, float]
"""Natural logarithms of the probabilities of the likeliest tokens, by token id."""


@dataclass(frozen=True)
class Limits:
    """Limits of the loss; None: the noise is the limit.

    Attributes:
        max_kl: mean divergence of the next token's distribution, in nats.
        min_agreement: share of positions with the same likeliest token.
        max_score_drop: share of all questions.
    """

    max_kl: float | None = None
    min_agreement: float | None = None
    max_score_drop: float | None = None


@dataclass(frozen=True)
class Measured:
    """One server beside the unchanged model.

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
        right: number of right answers.
        lost, gained: right answers of the unchanged model that are wrong here, and the reverse.
        other_answers: number of answers with other words.
    """

    mean_kl: float
    p99_kl: float
    agreement: float
    nll_change: float
    covered: float
    positions: int
    kl_by_text: tuple[float, ...]
    agreement_by_text: tuple[float, ...]
    right: int
    lost: int
    gained: int
    questions: int
    other_answers: int


@dataclass(frozen=True)
class Report:
    """Results of a measurement.

    Attributes:
        right: right answers of the unchanged model.
        noise: its second server.
        layers: by choice, of those that could be served.
        failed: reasons why others could not.
    """

    right: int
    noise: Measured
    layers: Mapping[str, Measured]
    failed: Mapping[str, str]
    limits: Limits

    @property
    def beyond(self) -> list[str]:
        """A sentence for each metric of a choice that is beyond the noise, or the user's limit."""
        return [
            f"{name}: {words}"
            for name, measured in self.layers.items()
            for words in beyond(measured, self.noise, self.limits).values()
        ]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**plain.as_json(self), "beyond": self.beyond}


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
    least = sorted(other.values())[:2][-1]
    most = min(math.exp(least), 1 - sum(math.exp(q) for q in other.values()))
    log_most = math.log(max(most, _SMALLEST))
    single = sum(math.exp(p) * (p - log_most) for t, p in reference.items() if t not in shared)
    unnamed = 1 - sum(math.exp(p) for p in reference.values())
    bounds = both + _merged(1 - covered, left), both + single + _merged(unnamed, left)
    return max(*bounds, 0.0), min(covered, 1.0)


def _merged(p: float, q: float) -> float:
    """Return the term of many tokens merged, with probabilities p and at most q."""
    return p * math.log(p / max(q, _SMALLEST)) if p > _SMALLEST else 0.0


def distance(
    tokens: Sequence[Sequence[int]],
    reference: Sequence[Sequence[Logprobs]],
    other: Sequence[Sequence[Logprobs]],
) -> dict[str, Any]:
    """Compare two servers' distributions over the same texts.

    Args:
        tokens: of each text, the scored token at each position.

    Returns:
        The first eight fields of ``Measured``.
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
    return {
        "mean_kl": statistics.fmean(every),
        "p99_kl": every[math.ceil(0.99 * len(every)) - 1],
        "agreement": sum(map(sum, same)) / len(every),
        "nll_change": statistics.fmean(changes),
        "covered": statistics.fmean(covered),
        "positions": len(every),
        "kl_by_text": tuple(map(statistics.fmean, kls)),
        "agreement_by_text": tuple(map(statistics.fmean, same)),
    }


def beyond(measured: Measured, noise: Measured, limits: Limits) -> dict[str, str]:
    """Return a sentence for each metric (kl, token or answers) beyond its limit.

    Without a user's limit a metric is beyond the noise if the 95 % interval of its addition, over
    texts, is all worse than nothing. For answers it is McNemar's test with the unchanged model's.
    """
    kl, same = measured.mean_kl, measured.agreement
    lost, gained = measured.lost, measured.gained
    more_kl = added(noise.kl_by_text, measured.kl_by_text)
    fewer = added(measured.agreement_by_text, noise.agreement_by_text)
    drop = (lost - gained) / max(measured.questions, 1)
    far = {
        "kl": more_kl > 0 if limits.max_kl is None else kl > limits.max_kl,
        "token": fewer > 0 if limits.min_agreement is None else same < limits.min_agreement,
        "answers": chance_to_lose(lost, gained) < _CHANCE
        if limits.max_score_drop is None
        else drop > limits.max_score_drop,
    }
    words = {
        "kl": f"mean KL {kl:.5f}, noise {noise.mean_kl:.5f}, limit {limits.max_kl}",
        "token": f"same top token at {same:.3f} of positions, noise {noise.agreement:.3f},"
        f" limit {limits.min_agreement}",
        "answers": f"{lost} right answers lost and {gained} gained, limit {limits.max_score_drop}",
    }
    return {name: words[name].replace("limit None", "beyond it") for name in far if far[name]}


def added(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval of the mean difference, by Student's t."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    freedom = len(differences) - 1
    if freedom < 1:
        return -math.inf
    t = _T[freedom - 1] if freedom <= len(_T) else 1.960 + 2.373 / freedom
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) - t * error


def chance_to_lose(lost: int, gained: int) -> float:
    """Return the probability of at least so many losses, if both are equally likely (McNemar)."""
    changed = lost + gained
    ways = sum(math.comb(changed, count) for count in range(lost, changed + 1))
    return math.ldexp(ways, -changed)


def table(report: Report) -> list[tuple[str, ...]]:
    """Return the figures as rows of text, the head first."""
    head = "layers", "mean KL", "p99 KL", "same token", "NLL", "covered", "right", "changed"
    rows: list[tuple[str, ...]] = [(*head, "beyond")]
    for name, far in {"(noise)": report.noise, **report.layers}.items():
        rows.append(
            (
                name,
                f"{far.mean_kl:.5f}",
                f"{far.p99_kl:.4f}",
                f"{far.agreement:.4f}",
                f"{far.nll_change:+.4f}",
                f"{far.covered:.4f}",
                f"{far.right}/{far.questions}",
                str(far.other_answers),
                ", ".join(beyond(far, report.noise, report.limits)) or "-",
            )
        )
    return rows
