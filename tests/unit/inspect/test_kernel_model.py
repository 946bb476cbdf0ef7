"""The model of the decode kernels: arithmetic by hand, the recorded kernels, the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.cli.main import main
from sparkforge.core.errors import ProofError, StaleError, UsageError
from sparkforge.inspect.perf import kernelmodel, kerneltable, kernelwork
from sparkforge.inspect.perf.kernelmodel import Product, blocks_of, estimate, product_of
from sparkforge.inspect.perf.kernelwork import Recorded, Work
from sparkforge.inspect.perf.machines import GB10, H200, Machine
from sparkforge.inspect.perf.shapes import SHAPES
from sparkforge.inspect.proofs.decode import RULES, rule_of
from sparkforge.inspect.proofs.flow import Flow
from sparkforge.pins import pins
from tests.support import ROOT

BIG = SHAPES["gpt-oss-120b"]
FLOW = Flow(
    looped=True,
    weights=2048,
    instructions=400,
    integer=100,
    multiply=50,
    float32=60,
    matrix=10,
    loaded=4096,
    shared=1024,
    beside=0,
    once=0,
    in_flight=2048,
    early=True,
    narrow=(),
    conversions=(),
)
WORK = Work("dense_bf16_narrow_12_8", 384, 80, 6144, FLOW)
# 960 x 1024 in BF16: 60 blocks, 1,966,080 bytes, 960 passes of 2,048
PRODUCT = Product(WORK.name, "qkv", 8, 960, 1024, "bf16", 1, 60, 0)
# one instruction a nanosecond and scheduler
SIMPLE = Machine(
    name="simple",
    arch="121a",
    multiprocessors=10,
    clock_ghz=1.0,
    memory_gb_s=100.0,
    latency_us=1.0,
    warps=48,
    blocks=24,
    registers=65_536,
    shared=102_400,
    matrix=32.0,
    integer=2.0,
    multiply=2.0,
    float32=1.0,
    loaded=64,
    from_shared=128,
    notes=(),
)


def made(flow: Flow = FLOW, product: Product = PRODUCT, machine: Machine = SIMPLE) -> float:
    return estimate(replace(WORK, flow=flow), product, machine).compute_us


def test_the_time_of_memory_and_of_instructions_by_hand() -> None:
    one = estimate(WORK, PRODUCT, SIMPLE)
    assert one.memory_us == pytest.approx(19.6608)  # 1,966,080 B at 100 GB/s
    # 400 cycles of 40 schedulers for each of 960 passes
    assert one.unit == "instructions"
    assert one.compute_us == pytest.approx(9.6)
    assert one.per_kib == 200
    assert one.share == pytest.approx(9.6 / 19.6608)
    assert one.bound_by_memory
    assert one.least_us == one.memory_us


@pytest.mark.parametrize(
    ("change", "unit", "cycles"),
    [
        ({"integer": 300}, "integer", 600),
        ({"multiply": 250}, "multiply", 500),
        ({"float32": 401}, "float32", 401),
        ({"matrix": 13}, "matrix", 416),
        # a scheduler has a quarter of 64 and of 128 bytes a cycle
        ({"loaded": 8192}, "loads", 512),
        ({"shared": 16384}, "shared memory", 512),
    ],
)
def test_the_busiest_unit_counts(change: dict[str, int], unit: str, cycles: int) -> None:
    one = estimate(replace(WORK, flow=replace(FLOW, **change)), PRODUCT, SIMPLE)  # type: ignore[arg-type]
    assert one.unit == unit
    assert one.compute_us == pytest.approx(960 * cycles / 40 / 1e3)


def test_what_comes_on_top() -> None:
    # 60 blocks of 12 warps, 100 instructions each
    assert made(replace(FLOW, once=100)) == pytest.approx(9.6 + 60 * 12 * 100 / 40 / 1e3)
    # the end of a row comes once in 1024 / 64 tiles
    assert made(replace(FLOW, beside=160)) == pytest.approx(9.6 * 410 / 400)
    # four blocks use four of the ten SMs
    few = replace(PRODUCT, blocks=4)
    assert made(product=few) == pytest.approx(9.6 * 10 / 4)


def test_scales_cost_memory_and_no_instructions() -> None:
    narrow = replace(PRODUCT, form="mxfp4")
    one = estimate(WORK, narrow, SIMPLE)
    # a quarter of the weights' bytes, and a sixteenth more for scales
    assert one.memory_us == pytest.approx(19.6608 / 4 * 17 / 16)
    assert one.compute_us == pytest.approx(9.6 / 4)
    wide = estimate(WORK, replace(PRODUCT, form="mxfp8"), SIMPLE)
    assert wide.memory_us == pytest.approx(19.6608 / 2 * 33 / 32)
    assert wide.compute_us == pytest.approx(9.6 / 2)


def test_sixty_percent_is_the_bar() -> None:
    limit = replace(SIMPLE, memory_gb_s=1966.080 / 9.6 * 0.6)
    assert estimate(WORK, PRODUCT, replace(limit, memory_gb_s=122.8)).bound_by_memory
    assert limit.memory_gb_s == pytest.approx(122.88)
    assert not estimate(WORK, PRODUCT, replace(limit, memory_gb_s=122.9)).bound_by_memory


@pytest.mark.parametrize(
    ("change", "shared", "blocks"),
    [
        # 80 registers x 32 x 12 warps = 30,720 of 65,536
        ({}, 0, 2),
        # 81 are 2,592 a warp, which take 2,816: 33,792
        ({"registers": 81}, 0, 1),
        ({"registers": 40}, 0, 4),  # 48 warps hold four blocks of 12
        # 6,144 and 1,024 of the system's
        ({"registers": 40}, 30_000, 2),
        ({"registers": 40, "threads": 32}, 0, 14),
    ],
)
def test_blocks_of_an_sm(change: dict[str, int], shared: int, blocks: int) -> None:
    work, product = replace(WORK, **change), replace(PRODUCT, shared=shared)  # type: ignore[arg-type]
    assert blocks_of(work, product, SIMPLE) == blocks


def test_bytes_in_flight() -> None:
    assert estimate(WORK, PRODUCT, SIMPLE).in_flight == 2 * 12 * 2048
    # one block for each SM, or fewer
    assert estimate(WORK, replace(PRODUCT, blocks=None), SIMPLE).in_flight == 12 * 2048
    assert estimate(WORK, replace(PRODUCT, blocks=5), SIMPLE).in_flight == 12 * 2048 / 2
    assert SIMPLE.needed == 100e9 * 1e-6 / 10
    # others: 3 KB on each of 48 SMs give 150 GB/s
    assert GB10.needed == pytest.approx(3072 * 273 / 150)
    assert H200.needed is None


def test_kernels_that_cannot_be_estimated_are_errors() -> None:
    with pytest.raises(ProofError, match="reads no weights"):
        estimate(replace(WORK, flow=None), PRODUCT, SIMPLE)
    with pytest.raises(ProofError, match="no block fits"):
        estimate(WORK, replace(PRODUCT, shared=200_000), SIMPLE)
    with pytest.raises(ProofError, match="attention_1: the model does not know"):
        product_of("attention_1", BIG)


def test_products_of_the_kernels() -> None:
    qkv = product_of("dense_mxfp4_narrow_12_8", BIG)
    assert qkv == Product("dense_mxfp4_narrow_12_8", "qkv", 8, 5120, 2880, "mxfp4", 1, 320, 0)
    assert qkv.bytes == 5120 * 2880 * 17 / 32
    head = product_of("dense_bf16_wide_16", BIG)
    assert head is not None
    assert (head.n, head.blocks, head.shared) == (201088, None, 16 * (2880 + 32) * 2)
    up, down = product_of("experts_gate_up_8", BIG), product_of("experts_down_1", BIG)
    assert up is not None
    assert down is not None
    assert (up.n, up.k) == (5760, 2880)
    assert up.blocks == pytest.approx(45 * 128 * (1 - 0.96875**8))
    assert (down.n, down.k, down.copies, down.blocks) == (2880, 2880, 4, 180)
    assert product_of("experts_combine", BIG) is None
    router = product_of("route_4", BIG)
    assert router is not None
    assert (router.n, router.blocks, router.bytes) == (128, 8, 737_280)


# -- what is recorded -------------------------------------------------------------------------


def test_the_record_is_of_the_sources_and_has_all_kernels() -> None:
    recorded = kernelwork.load()
    plugin = pins.load(ROOT / "pins.yaml").plugin
    assert plugin is not None
    kernelwork.check(recorded, ROOT, plugin)
    names = {work.name for work in recorded.kernels["121a"]}
    assert names == {work.name for work in recorded.kernels["90a"]}
    for name in names:
        assert rule_of(name, RULES)
        product_of(name, BIG)
    assert kernelwork.text(recorded) == kernelwork.FILE.read_text()


def test_another_source_makes_the_record_stale(tmp_path: Path) -> None:
    recorded = kernelwork.load()
    plugin = pins.load(ROOT / "pins.yaml").plugin
    assert plugin is not None
    sources = {**recorded.sources, "kernels/csrc/mx.cuh": "0" * 64}
    with pytest.raises(StaleError, match=r"kernels/csrc/mx\.cuh") as caught:
        kernelwork.check(replace(recorded, sources=sources), ROOT, plugin)
    assert "proofs decode-kernels --record" in str(caught.value)
    with pytest.raises(StaleError, match="missing, or of another version"):
        kernelwork.load(tmp_path / "none.json")


def test_no_kernel_was_measured_faster_than_the_model_allows() -> None:
    """Within 2 %: the bandwidth is itself a measurement."""
    shares = [float(row[7].rstrip("%")) for row in kerneltable.checked(kernelwork.load())]
    assert len(shares) == 24
    assert max(shares) <= 102
    assert min(shares) > 40, "the model leaves out more than it has"


def test_products_that_were_measured_are_all_in_the_model() -> None:
    found = kernelmodel.estimates(kernelwork.load().kernels["90a"], BIG, H200)
    layers = {(one.product.layer, one.product.form) for one in found}
    for layer, form in kernelmodel.MEASURED:
        assert ("down" if layer == "experts" else layer, form) in layers


# -- tables -----------------------------------------------------------------------------------


def recorded_of(work: Work) -> Recorded:
    return Recorded({}, "13.0.88", {"121a": (work,), "90a": kernelwork.load().kernels["90a"]})


def test_the_table_says_no_with_its_reason() -> None:
    one = estimate(WORK, PRODUCT, GB10)
    assert kerneltable.verdict(one, GB10) == "yes"
    slow = replace(one, compute_us=one.memory_us)
    assert kerneltable.verdict(slow, GB10) == "no: instructions"
    few = replace(slow, product=replace(PRODUCT, blocks=8))
    assert kerneltable.verdict(few, GB10) == "no: 8 blocks for 48 SMs"
    # 2.4 GHz are enough for 60 % at most: all of memory's time needs 4
    assert kerneltable.cells(slow, GB10)[9] == "4.0"
    heavy = replace(WORK, flow=replace(FLOW, instructions=4_000_000))
    text = kerneltable.markdown(recorded_of(heavy))
    assert "0 of 1 are bound by memory" in text
    assert "Not so: `dense_bf16_narrow_12_8`." in text
    assert "Not so" not in kerneltable.markdown(recorded_of(WORK))


def test_rows_that_a_kernel_serves() -> None:
    assert [kerneltable.rows_of(rows) for rows in (1, 2, 4, 8, 16)] == [
        "1",
        "2",
        "3 to 4",
        "5 to 8",
        "9 to 16",
    ]


def test_the_command_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", "--target", "spark", "--kernels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["name"] == "GB10"
    assert {one["product"]["kernel"] for one in found["kernels"]} >= {"dense_mxfp4_wide_8"}
    assert all(one["memory_us"] > 0 and one["compute_us"] > 0 for one in found["kernels"])
    assert main(["roofline", "--target", "spark", "--kernels"]) == 0
    assert "nobody ran this on a GB10" in capsys.readouterr().out


def test_a_target_without_figures_is_an_error() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    with pytest.raises(UsageError, match="no figures of its GPU"):
        kerneltable.machine_of(loaded.target("rtx"), "rtx")
    with pytest.raises(UsageError, match="no figures of its GPU"):
        kerneltable.machine_of(loaded.target("cpu"), "cpu")
