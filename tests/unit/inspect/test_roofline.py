"""The roofline: totals computed by hand, what OpenAI published, and how bytes may move."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.cli.main import main
from sparkforge.core.errors import UsageError
from sparkforge.inspect.perf import launches, rooflinepicture, rooflinetable, speculation
from sparkforge.inspect.perf.roofline import ceiling, checkpoint, parse_layers
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.inspect.perf.traffic import (
    GB,
    MOE_MULTIPLES,
    Moe,
    Setup,
    distinct_experts,
    expert_bytes,
    padded_dense,
    padded_experts,
    step_bytes,
    weight_bytes,
)
from sparkforge.pins import pins
from tests.support import ROOT

BIG, SMALL = SHAPES["gpt-oss-120b"], SHAPES["gpt-oss-20b"]


def spark() -> rooflinetable.Case:
    return rooflinetable.case(pins.load(ROOT / "pins.yaml").target("spark"), "spark")


ALL = parse_layers("qkv,o,lm_head")
MOES: list[Moe] = list(MOE_MULTIPLES)


# -- against what is known from elsewhere ----------------------------------------


def test_the_shapes_give_what_openai_published() -> None:
    """Model card of gpt-oss, table 1: 116.83 and 20.91 B parameters, 60.8 and 12.8 GiB."""
    for shape, billions, gib in ((BIG, 116.83, 60.8), (SMALL, 20.91, 12.8)):
        parameters, size = checkpoint(shape)
        assert round(parameters / 1e9, 2) == billions
        assert round(size / 2**30, 1) == gib
    assert round(checkpoint(BIG)[1] / GB, 1) == 65.2  # the safetensors files together


def test_stock_and_the_whole_series_by_hand() -> None:
    """Issue's check points: 5.25 GB → at most 2.83, ceiling 52 → at least 95 at 273 GB/s."""
    # 36 layers, 4 experts, gate/up/down; 17 bytes for 32 weights; biases of two bytes
    marlin = 36 * 4 * (3 * 3072 * 2944 * 17 // 32 + 2 * (2 * 2944 + 3072))
    narrow = 36 * 4 * (3 * 2880 * 2880 * 17 // 32 + 2 * (2 * 2880 + 2880))
    router = 36 * 2 * (128 * 2880 + 128)
    qkv, o, head = 36 * 5120 * 2880, 36 * 2880 * 4096, 201088 * 2880
    biases = 36 * 2 * (5120 + 2880)
    # half of the layers see 2048 tokens, the others 128; k and v, 8 heads of 64, two bytes
    kv = 18 * (2048 + 128) * 2 * 8 * 64 * 2
    other = 2 * (2880 * (36 * 2 + 1) + 36 * 64 + 2880)

    stock = step_bytes(BIG, Setup("marlin-release"), context=2048)
    assert stock.total == marlin + router + 2 * (qkv + o + head) + biases + kv + other
    assert stock.total == 5_255_241_984
    assert round(ceiling(stock, 273)) == 52

    best = step_bytes(BIG, Setup("marlin", ALL), context=2048)
    assert best.total == narrow + router + (qkv + o + head) * 17 // 32 + biases + kv + other
    assert best.total == 2_829_109_248
    assert ceiling(best, 273) >= 95


def test_padding_of_the_experts() -> None:
    exact = step_bytes(BIG, Setup("triton"), context=1).experts
    share = {moe: step_bytes(BIG, Setup(moe), context=1).experts / exact for moe in MOES}
    assert padded_experts(BIG, "marlin-release") == (3072, 2944)
    assert padded_experts(BIG, "marlin") == (2880, 2880)
    assert padded_experts(BIG, "flashinfer_cutlass") == (2944, 2944)
    assert padded_experts(BIG, "triton") == (2880, 2880)
    assert round(share["marlin-release"], 3) == 1.090
    assert share["marlin"] == 1
    # the checkpoint holds its experts unpadded
    assert expert_bytes(BIG, "triton") == 3 * 2880 * 2880 * 17 / 32 + 3 * 2880 * 2


@pytest.mark.parametrize(
    ("rows", "columns", "padded"),
    [
        (5120, 2880, (5120, 2880)),
        (2880, 4096, (2880, 4096)),
        (201088, 2880, (201088, 2880)),
        (65, 64, (128, 64)),
        (64, 65, (64, 128)),
        (1, 1, (64, 128)),
        (192, 192, (192, 256)),
    ],
)
def test_padding_of_dense_weights(rows: int, columns: int, padded: tuple[int, int]) -> None:
    assert padded_dense(rows, columns) == padded


def test_formats() -> None:
    assert weight_bytes(64, 128, "bf16") == 64 * 128 * 2
    assert weight_bytes(64, 128, "mxfp8") == 64 * 128 + 64 * 4
    assert weight_bytes(64, 128, "mxfp4") == 64 * 64 + 64 * 4


def test_keys_and_values() -> None:
    def kv(context: int, cache: str = "auto", batch: int = 1) -> float:
        setup = Setup("marlin", {}, "fp8" if cache == "fp8" else "auto")
        return step_bytes(BIG, setup, context=context, batch=batch).kv

    assert kv(1) == 36 * 2048
    assert kv(128) == 36 * 128 * 2048
    assert kv(129) == kv(128) + 18 * 2048  # the sliding layers have seen enough
    assert kv(32768) == 18 * (32768 + 128) * 2048
    assert kv(32768, "fp8") == kv(32768) / 2
    assert kv(2048, batch=8) == 8 * kv(2048)


# -- how it may move ---------------------------------------------------------------

shapes = st.sampled_from([BIG, SMALL])
setups = st.builds(
    Setup,
    st.sampled_from(MOES),
    st.dictionaries(st.sampled_from(["qkv", "o", "lm_head"]), st.sampled_from(["mxfp4", "mxfp8"])),
    st.sampled_from(["auto", "fp8"]),
)
contexts, batches = st.integers(1, 131072), st.integers(1, 512)


@given(shapes, setups, contexts, batches)
def test_more_is_never_less(shape: object, setup: Setup, context: int, batch: int) -> None:
    assert isinstance(shape, type(BIG))
    now = step_bytes(shape, setup, context=context, batch=batch)
    assert all(part > 0 for part in now.parts().values())
    longer = step_bytes(shape, setup, context=context + 1, batch=batch)
    more = step_bytes(shape, setup, context=context, batch=batch + 1)
    assert longer.total > now.total
    assert more.total > now.total
    # weights are shared by the batch: each token gets cheaper
    assert more.total / (batch + 1) < now.total / batch
    for kind in ("qkv", "o", "lm_head"):
        others = {name: form for name, form in setup.layers.items() if name != kind}
        by_format = [
            step_bytes(
                shape,
                Setup(setup.moe, {**others, kind: form}, setup.kv_cache),
                context=context,
                batch=batch,
            ).total
            for form in ("mxfp4", "mxfp8", "bf16")
        ]
        assert by_format == sorted(by_format)
        assert len(set(by_format)) == 3


@given(st.integers(1, 256), st.integers(1, 8), st.integers(1, 4096))
def test_distinct_experts(experts: int, top_k: int, batch: int) -> None:
    top_k = min(top_k, experts)
    found = distinct_experts(experts, top_k, batch)
    assert found <= min(experts, top_k * batch) * (1 + 1e-9)
    assert found >= top_k * (1 - 1e-9)


def test_distinct_experts_by_counting() -> None:
    """Two tokens, two of four experts each: all 36 pairs of choices, counted."""
    from itertools import combinations, product

    choices = list(combinations(range(4), 2))
    seen = [len({*a, *b}) for a, b in product(choices, choices)]
    assert distinct_experts(4, 2, 2) == pytest.approx(sum(seen) / len(seen))


# -- launches and speculation ------------------------------------------------------------


def test_the_second_ceiling_and_launches_by_hand() -> None:
    table = {row.name: row for row in rooflinetable.rows(spark())}
    release, own = table["release"], table["decode kernels: qkv,o,lm_head"]
    assert spark().sustained == pytest.approx(240)
    assert release.sustained == pytest.approx(240e9 / 5_255_241_984)
    # 17 and 9 launches of 36 layers; 0.86 us each, or 1,300 us in 432
    assert (release.launches, own.launches) == (612, 324)
    least, most = launches.cost_ms(612)
    assert least == pytest.approx(0.52632)
    assert most == pytest.approx(1.8417, abs=1e-4)
    step = 2_829_109_248 / 240e9
    assert own.with_launches is not None
    slow, fast = own.with_launches
    assert fast == pytest.approx(1 / (step + 324 * 0.86e-6))
    assert slow == pytest.approx(1 / (step + 324 * 1300e-6 / 432))
    assert own.step == table["qkv,o,lm_head"].step
    assert table["experts by Triton: qkv,o,lm_head"].with_launches is None


def test_launches_cost_a_step_not_a_token() -> None:
    case = replace(spark(), batch=8)
    row = rooflinetable.rows(case)[0]
    assert row.with_launches is not None
    assert row.with_launches[1] == pytest.approx(8 / (row.step.total / 240e9 + 612 * 0.86e-6))


def test_what_speculation_has_to_accept_by_hand() -> None:
    """128 · (1 - (1 - 4/128)^n) experts; n = 2: 7.875 of 4."""
    setup = Setup("marlin")
    one = step_bytes(BIG, setup, context=2048)
    two = speculation.verify_bytes(BIG, setup, context=2048, tokens=2)
    assert two.experts == pytest.approx(one.experts * 7.875 / 4)
    assert (two.kv, two.qkv, two.lm_head) == (one.kv, one.qkv, one.lm_head)
    assert two.total - one.total == pytest.approx(one.experts * 3.875 / 4 + 2 * 2880)
    (exact, _, fast) = speculation.table(BIG, 2048)
    assert exact[1] == one.total
    assert [point.tokens for point in exact[2]] == [2, 3, 4, 5, 6, 7, 8]
    # 1.906 GB of 5.083 are experts: 1 + 0.375 * 0.96875
    assert exact[2][0].ratio == pytest.approx(1.3633, abs=1e-4)
    assert exact[2][0].accepted == pytest.approx(0.3633, abs=1e-4)
    last = fast[2][-1]
    assert last.experts == pytest.approx(28.7104, abs=1e-4)
    # 0.674 * (28.71 - 4) / 4, of seven drafts
    assert last.accepted == pytest.approx(4.162, abs=1e-3)
    assert last.share == pytest.approx(4.162 / 7, abs=1e-3)


def test_fewer_dense_bytes_ask_for_more_accepted_drafts() -> None:
    for points in zip(*(points for _, _, points in speculation.table(BIG, 2048)), strict=True):
        assert [point.accepted for point in points] == sorted(point.accepted for point in points)
    texts = rooflinetable.verify_cells(spark())
    assert texts[1][:2] == ("exact: as published, 5.08 GB", "0.36 (36%)")
    assert texts[3][0].endswith("2.83 GB")


# -- words -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("qkv", {"qkv": "mxfp4"}),
        ("qkv,o,lm_head=mxfp8", {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp8"}),
        (" qkv=mxfp4 , o=mxfp8", {"qkv": "mxfp4", "o": "mxfp8"}),
        ("moe,lm_head", {"lm_head": "mxfp4"}),
        ("moe=mxfp4", {}),
    ],
)
def test_layers_are_read(text: str, layers: dict[str, str]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not a layer kind"),
        ("qkv,", "'' is not a layer kind"),
        ("head", "'head' is not a layer kind"),
        ("o,o=mxfp8", "o occurs twice"),
        ("qkv=nvfp4", "qkv cannot be 'nvfp4': mxfp4 or mxfp8"),
        ("moe=mxfp8", "moe cannot be 'mxfp8': mxfp4"),
    ],
)
def test_layers_that_are_not_understood(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_layers(text)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "--target", "spark", "--layers", "o", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "not measurements" in told["note"]
    assert (told["model"], told["bandwidth_gb_s"]) == ("gpt-oss-120b", 273)
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["release"]["gain"] == 1
    assert rows["qkv,o,lm_head"]["ceiling_tok_s"] >= 95
    asked = rows["--layers o"]
    saved = rows["Marlin pads less"]["bytes"]["o"] - asked["bytes"]["o"]
    assert saved == 36 * 2880 * 4096 * (2 - 17 / 32)
    assert rows["release"]["sustained_tok_s"] < rows["release"]["ceiling_tok_s"]
    assert rows["release"]["launches"] == 612
    exact = told["speculation"][0]
    assert [step["tokens"] for step in exact["steps"]] == [2, 3, 4, 5, 6, 7, 8]
    assert all(figure["source"] for figure in told["published_by_others"])

    assert main(["roofline", "--target", "spark"]) == 0
    text = capsys.readouterr().out
    assert "not measurements" in text
    assert "published by others" in text

    half = ["--bandwidth", "136.5", "--model", "gpt-oss-20b", "--context", "64", "--batch", "8"]
    assert main(["roofline", "--target", "cpu", *half, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["published_by_others"] == []  # they are about the other model
    stock = step_bytes(SMALL, Setup("marlin-release"), context=64, batch=8)
    assert told["rows"][0]["bytes"] == stock.parts()
    assert told["rows"][0]["ceiling_tok_s"] == 8 * 136.5 * GB / stock.total


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["cpu"], "target cpu has no model"),
        (["cpu", "--model", "gpt-oss-20b"], "no memory_gb_s"),
        (["spark", "--model", "llama"], "'llama': unknown shape"),
        (["spark", "--context", "0"], "'0' is not a whole number from 1"),
        (["spark", "--bandwidth", "inf"], "'inf' is not a number from 10^-6"),
        # JSON has no word for an infinite ceiling
        (["spark", "--bandwidth", "1e308", "--json"], "'1e308' is not a number from 10^-6"),
        (["spark", "--layers", "all"], "'all' is not a layer kind"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    assert main(["roofline", "--target", *words]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert "hint: " in err


# -- the page ---------------------------------------------------------------------------


def test_the_page_is_what_the_model_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["docs", "--check"]) == 0
    # a project of its own, whose page lags behind
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("requirements", "kernels", "patches"):
        (tmp_path / name).symlink_to(ROOT / name)
    pins_yaml = (ROOT / "pins.yaml").read_text()
    assert "memory_gb_s: 273" in pins_yaml
    (tmp_path / "pins.yaml").write_text(pins_yaml.replace("memory_gb_s: 273", "memory_gb_s: 546"))
    here = ["docs", "--pins", str(tmp_path / "pins.yaml")]
    assert main([*here, "--check"]) == 3
    assert "update it" in capsys.readouterr().err
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    page = (tmp_path / "docs" / "roofline.md").read_text()
    assert "193.0 tok/s" in page
    assert "## What is counted" in page  # what people wrote is still there
    (tmp_path / "docs" / "roofline.md").write_text("no markers")
    assert main(here) == 2


def test_the_picture_shows_the_bytes() -> None:
    target = pins.load(ROOT / "pins.yaml").target("spark")
    case = rooflinetable.case(target, "spark")
    picture = rooflinepicture.svg(case)
    assert picture == rooflinepicture.svg(case)
    root = ET.fromstring(picture)
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = [rect for rect in root.findall("svg:rect", space) if rect.get("height") == "19"]
    rows = rooflinetable.rows(case)
    assert len(bars) == 4 * len(rows)
    for i, row in enumerate(rows):
        width = sum(float(bar.attrib["width"]) for bar in bars[4 * i : 4 * i + 4])
        assert width == pytest.approx(row.gb_per_token * 72, abs=0.3)
        last = bars[4 * i + 3].attrib
        assert float(last["x"]) + float(last["width"]) < 640  # room for the words behind it


def test_a_published_figure_lies_in_the_bar_of_its_ceiling() -> None:
    target = pins.load(ROOT / "pins.yaml").target("spark")
    case = rooflinetable.case(target, "spark")
    root = ET.fromstring(rooflinepicture.published(case))
    space = {"svg": "http://www.w3.org/2000/svg"}
    table = rooflinetable.compared(case)
    bars = [rect for rect in root.findall("svg:rect", space) if rect.get("height") == "15"]
    assert len(bars) == sum(limit is not None for _, limit in table)
    spots = [float(one.attrib["cx"]) for one in root.findall("svg:circle", space)][1:]
    scale, left = float(bars[0].attrib["width"]) / (table[0][1] or 0), float(bars[0].attrib["x"])
    wanted = [speed for figure, _ in table for speed in figure.tok_s]
    assert [(spot - left) / scale for spot in spots] == pytest.approx(wanted, abs=0.1)
