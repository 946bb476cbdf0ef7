"""`bench compare`: its statistics on made-up samples, its verdicts, its refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sparkforge.cli.main import main
from sparkforge.core.errors import BenchError, RegressionError
from sparkforge.inspect.bench import compare
from sparkforge.inspect.bench.compare import verdict
from sparkforge.inspect.bench.result import Identity, Result, load, save
from sparkforge.inspect.intervals import student

from .bench_results import DEEP, FOUR, ONE, result, samples

SIXTY = (59.0, 60.0, 61.0)


def only(before: Result, after: Result, **more: Any) -> compare.Change:
    """Return the change of two results that have one test."""
    (change,) = compare.compare(before, after, **more).changes
    return change


def test_welchs_interval_is_that_of_the_books() -> None:
    """The logarithms are 1, 2, 3 and 2, 4, 6, 8: by hand, a variance of 2 with 4.08 freedoms."""
    before = result(samples(ONE, [math.exp(n) for n in (1, 2, 3)]))
    after = result(samples(ONE, [math.exp(n) for n in (2, 4, 6, 8)]))
    change = only(before, after)
    assert math.log(change.ratio) == pytest.approx(3)
    half = 2.776 * math.sqrt(1 / 3 + (20 / 3) / 4)
    assert math.log(change.high) == pytest.approx(3 + half)
    assert math.log(change.low) == pytest.approx(3 - half)
    assert not change.paired
    assert change.before == pytest.approx(math.exp(2))


def test_rounds_that_took_turns_are_paired() -> None:
    """A drift from round to round that both meet does not hide a difference of five percent."""
    drift = (1.0, 1.3, 0.8, 1.1)
    before = samples(ONE, *([60 * one] for one in drift))
    after = samples(
        ONE, *([57 * one * noise] for one, noise in zip(drift, (1, 1.002, 0.998, 1), strict=True))
    )
    together = {"session": "one", "rounds": 4}
    change = only(result(before, **together), result(after, **together))
    assert change.paired
    assert change.ratio == pytest.approx(0.95, abs=0.001)
    assert change.verdict == "slower"
    apart = only(result(before, rounds=4), result(after, rounds=4))
    assert not apart.paired
    assert apart.verdict == "unclear"
    assert apart.ratio == pytest.approx(change.ratio)


def test_a_round_without_a_sample_moves_no_other_round() -> None:
    """llama-benchy omits the prefill of a short prompt where the latency was longer."""
    drift = (1.0, 1.3, 0.8, 1.1)
    before = samples(ONE, *([60 * one] for one in drift))
    after = samples(ONE, [57.0], [], *([57 * one] for one in drift[2:]))
    together = {"session": "one", "rounds": 4}
    change = only(result(before, **together), result(after, **together))
    assert (change.paired, change.verdict) == (True, "slower")
    assert change.high == pytest.approx(0.95)
    several = (samples(FOUR, *([60.0] for _ in drift)), samples(FOUR, *([57.0] for _ in drift)))
    pair = (result(before, several[0], **together), result(after, several[1], **together))
    assert compare.compare(*pair).changes[-1].ratio == pytest.approx(0.95)
    never = samples(ONE, [57.0], [], [], [])
    change = only(result(samples(ONE, [], [60.0], [], []), **together), result(never, **together))
    assert change.verdict == "unclear"


def test_a_result_compared_with_itself_is_not_slower() -> None:
    one = result(samples(ONE, SIXTY), samples(FOUR, SIXTY))
    found = compare.compare(one, one)
    assert not found.slower
    assert [change.ratio for change in found.changes] == pytest.approx([1, 1, 1])
    assert not found.changes[0].paired  # of one round there are no pairs


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.90, 0.96, "slower"),
        (0.90, 0.98, "unclear"),
        (0.98, 1.02, "same"),
        (0.96, 1.04, "unclear"),
        (1.04, 1.20, "faster"),
        (0.0, math.inf, "unclear"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low: float, high: float, word: str) -> None:
    assert verdict("decode", low, high, 0.03) == word
    # of a time less is better
    opposite = {"slower": "faster", "faster": "slower"}.get(word, word)
    assert verdict("ttft", low, high, 0.03) == opposite


def test_one_sample_gives_no_interval_and_no_verdict() -> None:
    change = only(result(samples(ONE, [60.0])), result(samples(ONE, [30.0])))
    assert change.ratio == pytest.approx(0.5)
    assert (change.low, change.high) == (0, math.inf)
    assert change.verdict == "unclear"
    assert student(0.9) == math.inf


def test_equal_samples_have_no_width() -> None:
    change = only(result(samples(ONE, [60.0] * 3)), result(samples(ONE, [50.0] * 3)))
    assert change.low == pytest.approx(change.ratio) == pytest.approx(change.high)
    assert change.verdict == "slower"


def test_the_quantiles_fall_to_the_normal_distributions() -> None:
    quantiles = [student(n) for n in range(1, 40)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert student(2.9) == student(2) == 4.303
    assert student(30) == 2.042
    assert student(40) == pytest.approx(2.021, abs=0.003)
    assert student(120) == pytest.approx(1.980, abs=0.001)


def test_many_tests_together_see_what_each_alone_does_not() -> None:
    """Twelve tests, each 4 % slower with 3 % of noise: one alone does not show it, all do."""
    random = Random(3)

    def noisy(mean: float) -> list[float]:
        return [mean * math.exp(random.gauss(0, 0.01)) for _ in range(3)]

    tests = [type(ONE)(0, 512 + n, 32, 1) for n in range(12)]
    before = result(*(samples(test, noisy(60)) for test in tests))
    after = result(*(samples(test, noisy(56)) for test in tests))
    *each, together = compare.compare(before, after).changes
    assert together.name == "all tests"
    assert any(one.verdict == "unclear" for one in each)
    assert together.verdict == "slower"
    assert together.high - together.low < min(one.high - one.low for one in each)


def test_what_all_tests_of_a_round_share_counts_once() -> None:
    """A start of the server that is slow for all tests is one observation, not one a test."""
    tests = [type(ONE)(0, 512 + n, 32, 1) for n in range(12)]
    together = {"session": "one", "rounds": 3}
    before = result(*(samples(test, [60.0], [60.0], [60.0]) for test in tests), **together)
    after = result(*(samples(test, [54.0], [59.0], [55.0]) for test in tests), **together)
    *each, all_tests = compare.compare(before, after).changes
    assert {one.verdict for one in each} == {"unclear"}
    assert all_tests.verdict == "unclear"
    assert (all_tests.low, all_tests.high) == pytest.approx((each[0].low, each[0].high))


def test_false_alarms_are_rare() -> None:
    """Of equal servers, 2.5 % at the most of the verdicts are "slower"; of the tests 1000 here."""
    random = Random(11)

    def noisy() -> list[float]:
        return [60 * math.exp(random.gauss(0, 0.05)) for _ in range(3)]

    found = [
        only(result(samples(ONE, noisy())), result(samples(ONE, noisy()))) for _ in range(1000)
    ]
    assert sum(one.verdict == "slower" for one in found) <= 25
    # and the interval holds the truth as often as it says
    assert sum(one.low <= 1 <= one.high for one in found) >= 940


def test_what_has_no_partner_is_named() -> None:
    before = result(samples(ONE, SIXTY), samples(DEEP, SIXTY, context=True))
    after = result(samples(ONE, SIXTY), samples(FOUR, SIXTY), text="9" * 64)
    found = compare.compare(before, after)
    assert set(found.only_in_one) == {
        "pp512 tg32 @ d4096 (c1), loading the context: decode, tok/s",
        "pp512 tg32 (c4): decode, tok/s",
    }
    assert found.differs == ("text differs",)
    with pytest.raises(BenchError, match="no test in common"):
        compare.compare(before, result(samples(FOUR, SIXTY)))


def test_another_target_model_or_profile_is_named() -> None:
    def served(**fields: Any) -> Result:
        return result(samples(ONE, SIXTY), identity=Identity("build", **fields))

    before = served(target="spark", model="openai/gpt-oss-120b", profile="exact", context=8192)
    after = served(target="rtx", model="openai/gpt-oss-20b", profile="fast", options=("--x", "1"))
    assert compare.compare(before, after).differs == (
        "target differs: spark, rtx",
        "model differs: openai/gpt-oss-120b, openai/gpt-oss-20b",
        "profile differs: exact, fast",
        "context differs: 8192, none",
        "command line differs: none, --x 1",
    )
    asked = result(samples(ONE, SIXTY), identity=Identity("url", "spark", context=8192))
    assert compare.compare(before, asked).differs == ()
    # the release and the build of one run: what differs is the build
    before, after = (replace(one, session="one") for one in (before, after))
    assert compare.compare(before, after).differs == ()


# -- the command ------------------------------------------------------------------------------


def kept(folder: Path, one: Result) -> str:
    save(one, folder)
    return str(folder)


def test_a_regression_has_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = kept(tmp_path / "a", result(samples(ONE, SIXTY), samples(ONE, SIXTY, metric="ttft")))
    slow = kept(
        tmp_path / "b",
        result(samples(ONE, (49.0, 50.0, 51.0)), samples(ONE, SIXTY, metric="ttft")),
    )
    assert main(["bench", "compare", fast, slow]) == RegressionError.exit_code == 9
    seen = capsys.readouterr()
    assert "pp512 tg32 (c1): decode is 0.833 of A" in seen.err
    assert "slower" in seen.out
    assert main(["bench", "compare", slow, f"{fast}/result.json"]) == 0
    assert "faster" in capsys.readouterr().out
    assert main(["bench", "compare", fast, slow, "--tolerance", "30"]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", fast, slow, "--json"]) == 9
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0]["verdict"] == "slower"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"disturbed": ("before x: other programs",)}, "before x: other programs"),
        ({"complete": False}, "the run is incomplete"),
    ],
)
def test_a_result_that_is_not_clean_is_not_compared_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], why: str
) -> None:
    good = kept(tmp_path / "a", result(samples(ONE, [60.0])))
    bad = kept(tmp_path / "b", result(samples(ONE, [60.0]), **fields))
    assert main(["bench", "compare", good, bad]) == BenchError.exit_code == 10
    err = capsys.readouterr().err
    assert f"{bad} is not clean: {why}" in err
    assert "--disturbed" in err
    assert main(["bench", "compare", good, bad, "--disturbed", "--json"]) == 0
    # no interval is null, not Infinity, which is no JSON
    assert json.loads(capsys.readouterr().out)["changes"][0]["high"] is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[1]", "not a result"),
        ('{"benchmarks": []}', "not a result"),  # llama-benchy's own
        ('{"schema_version": 7}', "another version of sparkforge"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_files_of_other_shapes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    good = kept(tmp_path / "a", result(samples(ONE, SIXTY)))
    (tmp_path / "b.json").write_text(text)
    assert main(["bench", "compare", good, str(tmp_path / "b.json")]) == 10
    err = capsys.readouterr().err
    assert why in err
    assert "hint: " in err
    assert "Traceback" not in err


def test_a_missing_result_and_an_impossible_sample_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No such file"):
        load(tmp_path / "nothing")
    impossible: tuple[list[list[float]], ...] = (
        [],
        [[]],
        [[], []],
        [[0.0, 1.0]],
        [[math.inf]],
        [[1e300]],
    )
    for rounds in impossible:
        save(result(samples(ONE, SIXTY)), tmp_path)
        document = json.loads((tmp_path / "result.json").read_text())
        document["samples"][0]["rounds"] = rounds
        (tmp_path / "result.json").write_text(json.dumps(document))
        with pytest.raises(BenchError, match="out of range"):
            load(tmp_path)


def test_samples_as_far_apart_as_can_be_are_compared(tmp_path: Path) -> None:
    far = ([2e-9], [9e8])
    one, other = (result(samples(ONE, *far[::step]), session="s", rounds=2) for step in (1, -1))
    save(one, tmp_path)
    assert only(load(tmp_path), other).verdict == "unclear"


def test_a_later_version_is_not_read_as_ours(tmp_path: Path) -> None:
    save(result(samples(ONE, SIXTY), schema_version=2), tmp_path)
    with pytest.raises(BenchError, match="another version"):
        load(tmp_path)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = result(samples(ONE, (60, 61.5), (59.0,)), samples(DEEP, SIXTY, context=True))
    save(one, tmp_path)
    assert load(tmp_path) == one
