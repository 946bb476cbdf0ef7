"""The arithmetic of `bench quality`, and the measurement on servers that are not there."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sparkforge.check import quality
from sparkforge.check.quality import Seen, Text
from sparkforge.core.errors import ServerError, UsageError


def logs(*probabilities: float) -> dict[int, float]:
    return {token: math.log(p) for token, p in enumerate(probabilities)}


# -- one position -------------------------------------------------------------------


def test_divergence_is_kullback_leibler() -> None:
    kl, covered = quality.divergence(logs(0.5, 0.25, 0.25), logs(0.25, 0.5, 0.25))
    assert kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert covered == pytest.approx(1)
    p, q = logs(0.9, 0.1), logs(0.5, 0.5)
    assert quality.divergence(p, q)[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert quality.divergence(p, p)[0] == 0


def test_unreturned_tokens_count_as_one() -> None:
    p, q = logs(0.6, 0.2, 0.1, 0.1), logs(0.3, 0.4, 0.15, 0.15)
    kl, covered = quality.divergence({0: p[0]}, {0: q[0], 2: q[2]})
    assert covered == pytest.approx(0.6)
    assert kl == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7))
    # disjoint tokens give a finite divergence
    kl, covered = quality.divergence({0: 0.0}, {1: 0.0})
    assert (covered, kl) == (0, 0)
    assert 5 < quality.divergence({0: math.log(0.5)}, {0: 0.0})[0] < 10


def test_divergence_is_a_lower_bound() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        p, q = (logs(*random.dirichlet(np.full(40, 0.3))) for _ in range(2))
        whole = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)
        for top in (1, 5, 20, 40):
            named = [dict(sorted(d.items(), key=lambda i: -i[1])[:top]) for d in (p, q)]
            assert quality.divergence(*named)[0] <= whole + 1e-4
            # the servers return the scored token, too, however unlikely it is
            scored = max(p, key=p.__getitem__)
            named = [{**one, scored: d[scored]} for one, d in zip(named, (p, q), strict=True)]
            kl, _ = quality.divergence(*named)
            assert kl <= whole + 1e-4
        assert kl == pytest.approx(whole, abs=1e-4)  # all 40 are named


# -- verdicts -----------------------------------------------------------------------


NOISE = [0.001, 0.002, 0.003, 0.002]


@pytest.mark.parametrize(
    ("kl", "beyond"),
    [
        (NOISE, False),
        ([0.002, 0.001, 0.002, 0.003], False),  # the same, elsewhere
        ([0.021, 0.022, 0.023, 0.022], True),
        ([0.001, 0.002, 0.003, 0.500], False),  # of one text only
        ([0.0, 0.0, 0.0, 0.0], False),  # nearer than the noise
    ],
)
def test_losses_beyond_noise(kl: list[float], beyond: bool) -> None:
    assert (quality.added(NOISE, kl) > 0) is beyond


def test_equal_models_are_rarely_beyond_noise() -> None:
    random = np.random.default_rng(3)

    def equal() -> list[float]:
        return list(random.lognormal(-7, 0.5, 24))

    assert sum(quality.added(equal(), equal()) > 0 for _ in range(1000)) <= 40


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (10, 2.228), (11, 2.201), (23, 2.069)])
def test_interval_is_students(freedom: int, t: float) -> None:
    after = [1.0] * freedom + [0.0]
    low = quality.added([0.0] * (freedom + 1), after)
    error = np.std(after, ddof=1) / math.sqrt(freedom + 1)
    assert (np.mean(after) - low) / error == pytest.approx(t, rel=0.015)
    assert quality.added([0.0], [9.0]) == -math.inf  # one text has no interval


# -- the whole ------------------------------------------------------------------------


@contextmanager
def start(arguments: Sequence[str]) -> Iterator[Any]:
    """A server that is its --mxfp4-layers; the one with ``o`` does not start."""
    if arguments[-1] == "o":
        raise ServerError("the server exited with code 1", "see the server's output")
    yield arguments[-1]


def test_each_choice_is_served_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, bool]] = []

    def observe(server: Any, texts: Any, *, mixed: bool = False) -> Seen:
        served.append((server, mixed))
        bad = server == "lm_head"
        scored = [logs(0.1, 0.9) if bad else logs(0.9, 0.1)] * 2
        return [scored] * len(texts)

    written = {"prompt_token_ids": [1], "token_ids": [0, 1]}
    monkeypatch.setattr(quality, "_ask", lambda *_, **__: written)
    monkeypatch.setattr(quality, "_observe", observe)
    layers = ("qkv", "lm_head")
    found = quality.run(start, layers, 2, ["a", "b"])
    assert served == [("256", False), ("256", True), ("qkv", False), ("lm_head", False)]
    assert found["noise"]["mean_kl"] == found["layers"]["qkv"]["mean_kl"] == 0
    bad = found["layers"]["lm_head"]
    assert bad["mean_kl"] == pytest.approx(0.9 * math.log(9) + 0.1 * math.log(1 / 9))
    assert bad["kl_by_text"] == pytest.approx([bad["mean_kl"]] * 2)
    assert (bad["agreement"], bad["positions"]) == (0, 4)
    assert [sentence.partition(":")[0] for sentence in found["beyond"]] == ["lm_head"]

    # a limit of the user's replaces the noise
    assert not quality.run(start, layers, 2, ["a"], 9.0)["beyond"]
    assert quality.run(start, layers, 2, ["a"], 0.1)["beyond"]
    with pytest.raises(UsageError):  # one prompt shows no noise
        quality.run(start, layers, 2, ["a"])
    with pytest.raises(ServerError):
        quality.run(start, ("o",), 2, ["a", "b"])


def test_noise_server_gets_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)
    order: list[int] = []

    def score(server: Any, text: Text) -> Any:
        order.append(text[1][0])
        if server == "second":
            together.wait(120)
        return [logs(0.9, 0.1)] * text[1][0]

    monkeypatch.setattr(quality, "_score", score)
    texts = [([1], [number]) for number in range(8)]
    server: Any = "first"
    first = quality._observe(server, texts)
    assert order == list(range(8))
    server = "second"
    second = quality._observe(server, texts, mixed=True)
    assert second == first  # each text's own, in the texts' order
    assert sorted(order[8:]) == list(range(8))


def test_only_continuations_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def ask(server: Any, **body: Any) -> Any:
        asked.append(body)
        named = [{str(n): {"logprob": -float(n)}} for n in range(1, 4)]
        return {"prompt_logprobs": [None, *named]}

    monkeypatch.setattr(quality, "_ask", ask)
    server: Any = None
    assert quality._score(server, ([5, 6], [7, 8])) == [{2: -2.0}, {3: -3.0}]
    assert asked == [{"prompt": [5, 6, 7, 8], "max_tokens": 1, "prompt_logprobs": 256}]
    with pytest.raises(ServerError):
        quality._score(server, ([5], [7, 8]))
