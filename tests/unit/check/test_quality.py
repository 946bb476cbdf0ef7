"""The arithmetic of `bench quality`, and the measurement on servers that are not there."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkforge.check.perf import losses, quality
from sparkforge.check.perf.losses import Limits, Measured
from sparkforge.check.perf.quality import Material, Plan, Seen, Text
from sparkforge.cli import bench
from sparkforge.core.errors import CheckError, ServerError, UsageError


def logs(*probabilities: float) -> dict[int, float]:
    return {token: math.log(p) for token, p in enumerate(probabilities)}


# -- one position -------------------------------------------------------------------


def test_divergence_is_kullback_leibler() -> None:
    kl, covered = losses.divergence(logs(0.5, 0.25, 0.25), logs(0.25, 0.5, 0.25))
    assert kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert covered == pytest.approx(1)


def test_divergence_is_zero_for_equal_distributions() -> None:
    p, q = logs(0.9, 0.1), logs(0.5, 0.5)
    assert losses.divergence(p, q)[0] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert losses.divergence(q, p)[0] != pytest.approx(losses.divergence(p, q)[0])
    assert losses.divergence(p, p)[0] == 0


def test_unreturned_tokens_count_as_one() -> None:
    p, q = logs(0.6, 0.2, 0.1, 0.1), logs(0.3, 0.4, 0.15, 0.15)
    whole = losses.divergence(p, q)[0]
    named = {0: p[0], 1: p[1]}
    kl, covered = losses.divergence(named, {0: q[0], 1: q[1]})
    assert covered == pytest.approx(0.8)
    assert kl == pytest.approx(0.6 * math.log(2) + 0.2 * math.log(0.5) + 0.2 * math.log(0.2 / 0.3))
    kl, covered = losses.divergence({0: p[0]}, {0: q[0], 2: q[2]})
    assert covered == pytest.approx(0.6)
    assert kl == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7))
    assert kl < whole  # merging tokens can only lose divergence


def test_disjoint_tokens_give_a_finite_divergence() -> None:
    kl, covered = losses.divergence({0: 0.0}, {1: 0.0})
    assert covered == 0
    assert 10 < kl < 20
    kl, _ = losses.divergence({0: math.log(0.5)}, {0: 0.0})
    assert 5 < kl < 10


def test_divergence_is_a_lower_bound() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        p, q = (logs(*random.dirichlet(np.full(40, 0.3))) for _ in range(2))
        whole = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)
        for top in (1, 5, 20, 40):
            named = [dict(sorted(d.items(), key=lambda i: -i[1])[:top]) for d in (p, q)]
            kl, _ = losses.divergence(*named)
            assert kl <= whole + 1e-4
            # the servers return the scored token, too, however unlikely it is
            scored = max(p, key=p.__getitem__)
            named = [{**one, scored: d[scored]} for one, d in zip(named, (p, q), strict=True)]
            assert losses.divergence(*named)[0] <= whole + 1e-4
        assert kl == pytest.approx(whole, abs=1e-4)  # all 40 are named


def test_distances_are_over_all_positions() -> None:
    same, other = logs(0.9, 0.1), logs(0.1, 0.9)
    tokens, texts = [[0, 1], [0]], [[same, same], [same]]
    found = SimpleNamespace(**losses.distance(tokens, texts, [[same, other], [same]]))
    kl = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    assert found.kl_by_text == pytest.approx((kl / 2, 0))
    assert list(found.agreement_by_text) == [0.5, 1.0]
    assert found.positions == 3
    assert found.mean_kl == pytest.approx(kl / 3)
    assert found.p99_kl == pytest.approx(kl)
    assert found.agreement == pytest.approx(2 / 3)
    # token 1 has become likelier: less surprise, a negative change
    assert found.nll_change == pytest.approx((math.log(0.1) - math.log(0.9)) / 3)
    with pytest.raises(ValueError, match="zip"):
        losses.distance([[0]], [[same, same]], [[same, same]])


# -- answers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("42", "42"),
        (" 42.", "42"),
        ("**42**\n\n17 + 25 = 42", "42"),
        ("The answer is 42.", "42"),
        ("1,411", "1411"),
        ("$120$", "120"),
        ("08:40", "08:40"),
        ("Paris.", "Paris"),
        ("YES, he does", "yes"),
        ("`norI`", "nori"),
        ("B", "B"),
    ],
)
def test_right_answers(said: str, answer: str) -> None:
    assert quality.is_right(said, answer)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("420", "42"),
        ("142", "42"),
        ("42.5", "42"),
        ("", "42"),
        ("no\nyes", "yes"),
        ("yesterday", "yes"),
        ("08:405", "08:40"),
        ("3.42", "42"),
        ("forty-two", "42"),
    ],
)
def test_wrong_answers(said: str, answer: str) -> None:
    assert not quality.is_right(said, answer)


def test_material_is_complete() -> None:
    material = Material.load(Plan())
    assert len(set(material.prompts)) == 24
    assert len({question for question, _ in material.questions}) == 65
    for question, answer in material.questions:
        assert question.startswith("<|start|>user<|message|>")
        assert question.endswith("<|channel|>final<|message|>")
        assert quality.is_right(answer, answer)
    assert len(Material.load(Plan(prompts=2, questions=3)).questions) == 3


# -- verdicts -----------------------------------------------------------------------


def measured(
    kl: Sequence[float], same: Sequence[float], lost: int = 0, gained: int = 0
) -> Measured:
    means = (sum(kl) / len(kl), sum(same) / len(same))
    far = (means[0], max(kl), means[1], 0.0, 1.0, 8, tuple(kl), tuple(same))
    return Measured(*far, 10 - lost + gained, lost, gained, 20, lost + gained)


NOISE = measured([0.001, 0.002, 0.003, 0.002], [1, 0.9, 1, 1])


@pytest.mark.parametrize(
    ("one", "metrics"),
    [
        (NOISE, []),
        (measured([0.002, 0.001, 0.002, 0.003], [0.9, 1, 1, 1]), []),  # the same, elsewhere
        (measured([0.021, 0.022, 0.023, 0.022], [1, 0.9, 1, 1]), ["kl"]),
        (measured([0.001, 0.002, 0.003, 0.500], [1, 0.9, 1, 0.2]), []),  # of one text only
        (measured([0.001, 0.002, 0.003, 0.002], [0.5, 0.5, 0.6, 0.5]), ["token"]),
        (measured([0.001, 0.002, 0.003, 0.002], [1, 0.9, 1, 1], lost=6), ["answers"]),
        (measured([0.001, 0.002, 0.003, 0.002], [1, 0.9, 1, 1], lost=5), []),  # 1 in 32
        (measured([0.001, 0.002, 0.003, 0.002], [1, 0.9, 1, 1], lost=6, gained=6), []),
        (measured([0.001, 0.002, 0.003, 0.002], [1, 0.9, 1, 1], gained=9), []),
        (measured([0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]), []),  # nearer than the noise
    ],
)
def test_losses_beyond_noise(one: Measured, metrics: list[str]) -> None:
    assert list(losses.beyond(one, NOISE, Limits())) == metrics


def test_one_text_has_no_interval() -> None:
    one, other = measured([0.001], [1]), measured([5.0], [0.0])
    assert losses.beyond(other, one, Limits()) == {}


def test_equal_models_are_rarely_beyond_noise() -> None:
    random = np.random.default_rng(3)

    def equal() -> Measured:
        kl = random.lognormal(-7, 0.5, 24)
        right = random.binomial(4, 0.5)
        return measured(list(kl), list(1 - kl), int(right), 4 - int(right))

    found = [losses.beyond(equal(), equal(), Limits()) for _ in range(1000)]
    assert sum("kl" in one for one in found) <= 40
    assert not any("answers" in one for one in found)


@pytest.mark.parametrize(
    ("limits", "metrics"),
    [
        (Limits(0.1), []),
        (Limits(0.01), ["kl"]),
        (Limits(0.1, 0.95), ["token"]),
        (Limits(0.1, 0.5, 0.05), ["answers"]),
        (Limits(0.1, 0.5, 0.1), []),
    ],
)
def test_limit_replaces_noise(limits: Limits, metrics: list[str]) -> None:
    one = measured([0.02] * 4, [0.9] * 4, lost=2)
    near = measured([0.0] * 4, [0.9] * 4)
    assert list(losses.beyond(one, near, limits)) == metrics


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (10, 2.228), (11, 2.201), (23, 2.069)])
def test_interval_is_students(freedom: int, t: float) -> None:
    after = [1.0] * freedom + [0.0]
    low = losses.added([0.0] * (freedom + 1), after)
    error = np.std(after, ddof=1) / math.sqrt(freedom + 1)
    assert (np.mean(after) - low) / error == pytest.approx(t, rel=0.015)


# -- the whole ------------------------------------------------------------------------


class _Models:
    """Servers that say what their arguments ask for: quantised ones differ."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, ...]] = []
        self.mixed: list[bool] = []
        monkeypatch.setattr(quality, "_continue", lambda *_: Text([1], [0, 1]))
        monkeypatch.setattr(quality, "_observe", self._observe)

    def _observe(
        self, server: Any, texts: Any, material: Material, top: int, *, mixed: bool = False
    ) -> Seen:
        self.mixed.append(mixed)
        return Seen([server.scored] * len(texts), [server.answer] * len(material.questions))

    @contextmanager
    def start(self, arguments: Sequence[str]) -> Iterator[Any]:
        self.started.append(tuple(arguments))
        bad = arguments[-1] == "lm_head"
        if arguments[-1] == "o":
            raise ServerError("the server exited with code 1", "see the server's output")

        class Server:
            scored = [logs(0.1, 0.9) if bad else logs(0.9, 0.1)] * 2
            answer = "no" if bad else "42"

        yield Server


def test_each_choice_is_served_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = _Models(monkeypatch)
    plan = Plan(("qkv", "lm_head"), tokens=2, top=7)
    material = Material(["a", "b"], [("What?", "42"), ("And?", "43")])
    report = quality.run(models.start, plan, Limits(None, None, 0.2), material)
    found = report.document()
    common = ("--max-logprobs", "7")
    assert models.started == [
        common,
        common,
        (*common, "--mxfp4-layers", "qkv"),
        (*common, "--mxfp4-layers", "lm_head"),
    ]
    assert models.mixed == [False, True, False, False]
    assert found["right"] == 1
    assert found["noise"]["mean_kl"] == 0
    assert found["layers"]["qkv"]["mean_kl"] == 0
    assert found["layers"]["lm_head"]["mean_kl"] > 1
    assert found["layers"]["lm_head"]["other_answers"] == 2
    assert [sentence.partition(":")[0] for sentence in found["beyond"]] == ["lm_head"] * 3
    assert [row[0] for row in losses.table(report)] == ["layers", "(noise)", "qkv", "lm_head"]


def test_noise_server_gets_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)
    order: list[int] = []

    def score(server: Any, text: Text, top: int) -> Any:
        order.append(text.written[0])
        if server == "second":
            together.wait(120)
        return [logs(0.9, 0.1)] * text.written[0]

    monkeypatch.setattr(quality, "_score", score)
    texts = [Text([1], [number]) for number in range(8)]
    server: Any = "first"
    first = quality._observe(server, texts, Material(["a"], []), 7)
    assert order == list(range(8))
    server = "second"
    second = quality._observe(server, texts, Material(["a"], []), 7, mixed=True)
    assert second == first  # each text's own, in the texts' order
    assert sorted(order[8:]) == list(range(8))


def test_choice_that_fails_to_start_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = _Models(monkeypatch)
    plan = Plan(("qkv", "o", "lm_head"), tokens=2)
    material = Material(["a"], [("What?", "42")])
    found = quality.run(models.start, plan, Limits(0.1, 0.9, 0.2), material)
    assert found.failed == {"o": "the server exited with code 1"}
    assert list(found.layers) == ["qkv", "lm_head"]
    assert {line.partition(":")[0] for line in found.beyond} == {"lm_head"}
    assert bench.judge_quality(found) == ServerError.exit_code
    said = capsys.readouterr()
    assert "o: the server exited with code 1" in said.err
    assert "lm_head: mean KL" in said.err
    assert bench.judge_quality(replace(found, failed={})) == CheckError.exit_code
    assert bench.judge_quality(replace(found, failed={}, layers={})) == 0


def test_only_continuations_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def ask(server: Any, **body: Any) -> Any:
        asked.append(body)
        named = [{str(n): {"logprob": -float(n)}} for n in range(1, 4)]
        return {"prompt_logprobs": [None, *named]}

    monkeypatch.setattr(quality, "_ask", ask)
    server: Any = None
    assert quality._score(server, Text([5, 6], [7, 8]), 3) == [{2: -2.0}, {3: -3.0}]
    assert asked == [{"prompt": [5, 6, 7, 8], "max_tokens": 1, "prompt_logprobs": 3}]
    with pytest.raises(ServerError, match="4 logprobs for a prompt of 3 tokens"):
        quality._score(server, Text([5], [7, 8]), 3)


def test_nothing_to_compare_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    models = _Models(monkeypatch)
    with pytest.raises(UsageError, match="nothing to compare"):
        quality.run(models.start, Plan(()), Limits(1, 0, 1), Material(["a"], []))
    with pytest.raises(UsageError, match="one prompt shows no noise"):
        quality.run(models.start, Plan(), Limits(), Material(["a"], []))
    assert not models.started
