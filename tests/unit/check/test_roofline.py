"""The roofline: totals computed by hand, what OpenAI published, and how bytes may move."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.check.perf import roofline
from sparkforge.check.perf.roofline import ceiling, parse_layers
from sparkforge.check.perf.shapes import SHAPES
from sparkforge.check.perf.traffic import (
    GB,
    MOE_MULTIPLES,
    Moe,
    Setup,
    Shape,
    distinct_experts,
    expert_bytes,
    padded_dense,
    padded_experts,
    step_bytes,
    weight_bytes,
)
from sparkforge.cli.main import main
from sparkforge.core.errors import UsageError
from sparkforge.pins import pins
from tests.support import ROOT

BIG, SMALL = SHAPES["gpt-oss-120b"], SHAPES["gpt-oss-20b"]


def spark() -> roofline.Case:
    return roofline.case(pins.load(ROOT / "pins.yaml").target("spark"), "spark")


ALL = parse_layers("qkv,o,lm_head")
MOES: list[Moe] = list(MOE_MULTIPLES)


# -- against what is known from elsewhere ----------------------------------------


def checkpoint(shape: Shape) -> tuple[int, int]:
    """Return parameters and bytes of the published checkpoint: all experts, no padding."""
    hidden, layers = shape.hidden, shape.layers
    dense = (
        layers * (shape.qkv_rows * (hidden + 1) + hidden * (shape.o_columns + 1) + shape.heads)
        + layers * (hidden + 1) * shape.experts
        + (2 * layers + 1) * hidden
        + 2 * shape.vocab * hidden
    )
    biases = layers * shape.experts * (2 * shape.intermediate + hidden)
    packed = layers * shape.experts * 3 * hidden * shape.intermediate
    return packed + biases + dense, int(weight_bytes(packed, 1, "mxfp4")) + 2 * (biases + dense)


def test_shapes_give_published_sizes() -> None:
    """Model card of gpt-oss, table 1: 116.83 and 20.91 B parameters, 60.8 and 12.8 GiB."""
    for shape, billions, gib in ((BIG, 116.83, 60.8), (SMALL, 20.91, 12.8)):
        parameters, size = checkpoint(shape)
        assert round(parameters / 1e9, 2) == billions
        assert round(size / 2**30, 1) == gib
    assert round(checkpoint(BIG)[1] / GB, 1) == 65.2  # the safetensors files together


def test_bytes_of_release_and_series() -> None:
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
def test_bytes_grow_with_context_batch_and_bits(
    shape: object, setup: Setup, context: int, batch: int
) -> None:
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
def test_layers_are_parsed(text: str, layers: dict[str, str]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "qkv,", "head", "o,o=mxfp8", "qkv=nvfp4", "moe=mxfp8"])
def test_wrong_layers_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layers(text)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
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

    assert main(["roofline", "--target", "spark"]) == 0
    assert "96.5 tok/s" in capsys.readouterr().out

    half = ["--bandwidth", "136.5", "--model", "gpt-oss-20b", "--context", "64", "--batch", "8"]
    assert main(["roofline", "--target", "cpu", *half, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    stock = step_bytes(SMALL, Setup("marlin-release"), context=64, batch=8)
    assert told["rows"][0]["bytes"] == stock.parts()
    assert told["rows"][0]["ceiling_tok_s"] == 8 * 136.5 * GB / stock.total


@pytest.mark.parametrize(
    "words",
    [
        ["cpu"],  # no model
        ["cpu", "--model", "gpt-oss-20b"],  # no memory_gb_s
        ["spark", "--model", "llama"],
        ["spark", "--context", "0"],
        # JSON has no word for an infinite ceiling
        ["spark", "--bandwidth", "1e308", "--json"],
        ["spark", "--layers", "all"],
    ],
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    assert main(["roofline", "--target", *words]) == 2


# -- the page ---------------------------------------------------------------------------


def test_page_follows_pins(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["docs", "--check"]) == 0
    # a project of its own, whose page lags behind
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("requirements", "kernels", "patches", "docker-compose.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    pins_yaml = (ROOT / "pins.yaml").read_text()
    assert "memory_gb_s: 273" in pins_yaml
    (tmp_path / "pins.yaml").write_text(pins_yaml.replace("memory_gb_s: 273", "memory_gb_s: 546"))
    here = ["docs", "--pins", str(tmp_path / "pins.yaml")]
    assert main([*here, "--check"]) == 3
    assert "update it" in capsys.readouterr().err
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    page = (tmp_path / "docs" / "kernels.md").read_text()
    assert "193.0 tok/s" in page
    assert "## Bytes and ceilings" in page  # what people wrote is still there
    (tmp_path / "docs" / "kernels.md").write_text("no markers")
    assert main(here) == 2


def test_picture_shows_the_bytes() -> None:
    target = pins.load(ROOT / "pins.yaml").target("spark")
    case = roofline.case(target, "spark")
    picture = roofline.svg(case)
    assert picture == roofline.svg(case)
    root = ET.fromstring(picture)
    space = {"svg": "http://www.w3.org/2000/svg"}
    bars = [rect for rect in root.findall("svg:rect", space) if rect.get("height") == "19"]
    rows = roofline.rows(case)
    assert len(bars) == 4 * len(rows)
    for i, row in enumerate(rows):
        width = sum(float(bar.attrib["width"]) for bar in bars[4 * i : 4 * i + 4])
        assert width == pytest.approx(row.gb_per_token * 72, abs=0.3)
        last = bars[4 * i + 3].attrib
        assert float(last["x"]) + float(last["width"]) < 640  # room for the words behind it
