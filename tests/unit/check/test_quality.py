"""The arithmetic of `bench quality`, and the measurement on servers that are not there."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from sparkforge.check import quality
from sparkforge.check.divergence import divergence


def logs(*probabilities: float) -> dict[int, float]:
    return {token: math.log(p) for token, p in enumerate(probabilities)}


# -- one position -------------------------------------------------------------------


def test_divergence_is_kullback_leibler() -> None:
    kl, covered = divergence(logs(0.5, 0.25, 0.25), logs(0.25, 0.5, 0.25))
    assert kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert covered == pytest.approx(1)
    p, q = logs(0.9, 0.1), logs(0.5, 0.5)
    assert divergence(p, q)[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert divergence(p, p)[0] == 0


def test_unreturned_tokens_count_as_one() -> None:
    p, q = logs(0.6, 0.2, 0.1, 0.1), logs(0.3, 0.4, 0.15, 0.15)
    kl, covered = divergence({0: p[0]}, {0: q[0], 2: q[2]})
    assert covered == pytest.approx(0.6)
    assert kl == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7))
    # disjoint tokens give a finite divergence
    kl, covered = divergence({0: 0.0}, {1: 0.0})
    assert (covered, kl) == (0, 0)
    assert 5 < divergence({0: math.log(0.5)}, {0: 0.0})[0] < 10


def test_divergence_is_a_lower_bound() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        p, q = (logs(*random.dirichlet(np.full(40, 0.3))) for _ in range(2))
        whole = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)
        for top in (1, 5, 20, 40):
            named = [dict(sorted(d.items(), key=lambda i: -i[1])[:top]) for d in (p, q)]
            assert divergence(*named)[0] <= whole + 1e-4
            # the servers return the scored token, too, however unlikely it is
            scored = max(p, key=p.__getitem__)
            named = [{**one, scored: d[scored]} for one, d in zip(named, (p, q), strict=True)]
            kl, _ = divergence(*named)
            assert kl <= whole + 1e-4
        assert kl == pytest.approx(whole, abs=1e-4)  # all 40 are named


# -- the whole ------------------------------------------------------------------------


@contextmanager
def start(arguments: Sequence[str]) -> Iterator[Any]:
    """A server that is its --mxfp4-layers."""
    yield arguments[-1]


def test_each_choice_is_compared_with_the_unchanged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(server: Any, *text: Any) -> Any:
        bad = server == "lm_head"
        return [logs(0.1, 0.9) if bad else logs(0.9, 0.1)] * 2

    written = {"prompt_token_ids": [1], "token_ids": [0, 1]}
    monkeypatch.setattr(quality, "_ask", lambda *_, **__: written)
    monkeypatch.setattr(quality, "_score", score)
    found = quality.run(start, ("qkv", "lm_head"), 2, ["a", "b"])
    assert found["qkv"] == {"mean_kl": 0, "agreement": 1, "covered": 1, "positions": 4}
    bad = found["lm_head"]
    assert bad["mean_kl"] == pytest.approx(0.9 * math.log(9) + 0.1 * math.log(1 / 9))
    assert (bad["agreement"], bad["positions"]) == (0, 4)


def test_only_continuations_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def ask(server: Any, **body: Any) -> Any:
        asked.append(body)
        named = [{str(n): {"logprob": -float(n)}} for n in range(1, 4)]
        return {"prompt_logprobs": [None, *named]}

    monkeypatch.setattr(quality, "_ask", ask)
    server: Any = None
    assert quality._score(server, [5, 6], [7, 8]) == [{2: -2.0}, {3: -3.0}]
    assert asked == [{"prompt": [5, 6, 7, 8], "max_tokens": 1, "prompt_logprobs": 256}]
