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
from sparkforge.check.quality import Measured, Seen, Text
from sparkforge.cli import bench
from sparkforge.core.errors import CheckError, ServerError, UsageError


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


# -- answers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("42", "42", True),
        (" 42.", "42", True),
        ("**42**\n\n17 + 25 = 42", "42", True),
        ("The answer is 42.", "42", True),
        ("1,411", "1411", True),
        ("$120$", "120", True),
        ("08:40", "08:40", True),
        ("YES, he does", "yes", True),
        ("`norI`", "nori", True),
        ("B", "B", True),
        ("420", "42", False),
        ("142", "42", False),
        ("42.5", "42", False),
        ("", "42", False),
        ("no\nyes", "yes", False),
        ("yesterday", "yes", False),
        ("08:405", "08:40", False),
        ("3.42", "42", False),
    ],
)
def test_right_and_wrong_answers(said: str, answer: str, right: bool) -> None:
    assert quality.is_right(said, answer) is right


def test_material_is_complete() -> None:
    prompts, questions = quality.material(None, None)
    assert len(set(prompts)) == 24
    assert len({question for question, _ in questions}) == 65
    for question, answer in questions:
        assert question.startswith("<|start|>user<|message|>")
        assert question.endswith("<|channel|>final<|message|>")
        assert quality.is_right(answer, answer)
    assert [len(part) for part in quality.material(2, 3)] == [2, 3]


# -- verdicts -----------------------------------------------------------------------


def measured(kl: Sequence[float], lost: int = 0, gained: int = 0) -> Measured:
    return Measured(sum(kl) / len(kl), 1, 1, 8, tuple(kl), 10 - lost + gained, lost, gained, 20)


NOISE = measured([0.001, 0.002, 0.003, 0.002])


def words(one: Measured, noise: Measured = NOISE, *limits: float | None) -> list[str]:
    """Return "mean" for the divergence, and the number of lost answers."""
    found = quality.beyond(one, noise, *(limits or (None, None)))
    return [sentence.partition(" ")[0] for sentence in found]


@pytest.mark.parametrize(
    ("one", "metrics"),
    [
        (NOISE, []),
        (measured([0.002, 0.001, 0.002, 0.003]), []),  # the same, elsewhere
        (measured([0.021, 0.022, 0.023, 0.022]), ["mean"]),
        (measured([0.001, 0.002, 0.003, 0.500]), []),  # of one text only
        (measured([0.001, 0.002, 0.003, 0.002], lost=6), ["6"]),
        (measured([0.001, 0.002, 0.003, 0.002], lost=5), []),  # 1 in 32
        (measured([0.001, 0.002, 0.003, 0.002], lost=6, gained=6), []),
        (measured([0.0, 0.0, 0.0, 0.0]), []),  # nearer than the noise
    ],
)
def test_losses_beyond_noise(one: Measured, metrics: list[str]) -> None:
    assert words(one) == metrics


def test_equal_models_are_rarely_beyond_noise() -> None:
    random = np.random.default_rng(3)

    def equal() -> Measured:
        right = random.binomial(4, 0.5)
        return measured(list(random.lognormal(-7, 0.5, 24)), int(right), 4 - int(right))

    found = [words(equal(), equal()) for _ in range(1000)]
    assert sum("mean" in one for one in found) <= 40
    assert all(one in ([], ["mean"]) for one in found)


@pytest.mark.parametrize(
    ("limits", "metrics"),
    [((0.1, None), []), ((0.01, None), ["mean"]), ((0.1, 0.05), ["2"]), ((0.1, 0.1), [])],
)
def test_limit_replaces_noise(limits: tuple[float | None, ...], metrics: list[str]) -> None:
    assert words(measured([0.02] * 4, lost=2), measured([0.0] * 4), *limits) == metrics


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


def test_each_choice_is_served_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[str, bool]] = []

    def observe(server: Any, texts: Any, questions: Any, *, mixed: bool = False) -> Seen:
        served.append((server, mixed))
        bad = server == "lm_head"
        scored = [logs(0.1, 0.9) if bad else logs(0.9, 0.1)] * 2
        return [scored] * len(texts), ["no" if bad else "42"] * len(questions)

    written = {"prompt_token_ids": [1], "token_ids": [0, 1]}
    monkeypatch.setattr(quality, "_ask", lambda *_, **__: written)
    monkeypatch.setattr(quality, "_observe", observe)
    questions = [("What?", "42"), ("And?", "43")]
    found = quality.run(start, ("qkv", "o", "lm_head"), 2, ["a", "b"], questions, None, 0.2)
    assert served == [("256", False), ("256", True), ("qkv", False), ("lm_head", False)]
    assert found["noise"]["mean_kl"] == found["layers"]["qkv"]["mean_kl"] == 0
    bad = found["layers"]["lm_head"]
    assert bad["mean_kl"] == pytest.approx(0.9 * math.log(9) + 0.1 * math.log(1 / 9))
    assert (bad["agreement"], bad["positions"], bad["right"], bad["lost"]) == (0, 4, 0, 1)
    assert [sentence.partition(":")[0] for sentence in found["beyond"]] == ["lm_head"] * 2
    assert found["failed"] == {"o": "the server exited with code 1"}
    assert [row[0] for row in quality.table(found)] == ["layers", "(noise)", "qkv", "lm_head"]

    assert bench.judge_quality(found) == ServerError.exit_code
    said = capsys.readouterr()
    assert "o: the server exited with code 1" in said.err
    assert "lm_head: mean KL" in said.err
    assert bench.judge_quality({**found, "failed": {}}) == CheckError.exit_code
    assert bench.judge_quality({"failed": {}, "beyond": []}) == 0
    with pytest.raises(UsageError):  # one prompt shows no noise
        quality.run(start, ("qkv",), 2, ["a"], [])


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
    first = quality._observe(server, texts, [])
    assert order == list(range(8))
    server = "second"
    second = quality._observe(server, texts, [], mixed=True)
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
