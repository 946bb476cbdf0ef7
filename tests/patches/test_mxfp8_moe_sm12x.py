"""Numerics of the MXFP8 x MXFP8 MoE on SM12x: an emulation against a float64 reference.

No SM12x is at hand. What is compared is the arithmetic that the kernels' sources describe, on the
bytes that a caller has to prepare; the layout of the scales is asked of CUTLASS itself. That the
machine code has these instructions is `build.py proofs`' part. **Nothing was run on SM12x.**
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.core.run import call
from tests.patches.moe_dispatch import TIMEOUT_S, compile_host
from tests.patches.mxfp8_moe import (
    E4M3,
    Activation,
    Layer,
    Packed,
    Tactic,
    decode,
    emulate,
    gemm,
    make_layer,
    pack,
    quantize,
    reference,
    scale_offset,
    swizzle,
    to_bf16,
    to_e4m3,
)

TACTICS = [
    Tactic(columns, swap, finalize)
    for columns, swap, finalize in itertools.product((32, 64, 128), (False, True), (False, True))
]
# half a unit of BF16 is 2^-9, an output of three experts is rounded up to six times on the way, and
# a value between two E4M3 may fall to the other side
STAGED_TOLERANCE = 2.0**-7
# beside the exact layer: E4M3 between the products has 3 bits of mantissa, half a unit is 2^-4
EXACT_TOLERANCE = 2.0**-4

LAYERS = {
    # 80 tokens: experts with none, one and more than a tile of 32 or 64 rows
    "swiglu": make_layer(
        1,
        tokens=80,
        experts=4,
        hidden=192,
        inter=128,
        top_k=2,
        activation=Activation(),
        bias=0.0,
        expert_share=(0.8, 0.15, 0.05, 0.0),
    ),
    # gpt-oss's activation with biases; more rows than one tile in both products
    "swigluoai": make_layer(
        2,
        tokens=150,
        experts=3,
        hidden=256,
        inter=256,
        top_k=3,
        activation=Activation(1.702, 1.0, 7.0),
        bias=0.5,
    ),
}


def error(got: npt.NDArray[np.float32], want: npt.NDArray[np.float64]) -> float:
    """Return the greatest error of a token, as a share of the token's length."""
    lengths = np.linalg.norm(want, axis=1)
    return float((np.linalg.norm(got - want, axis=1) / lengths).max())


def test_formats() -> None:
    assert (E4M3[0x7E], E4M3[0x08], E4M3[0x01]) == (448.0, 2.0**-6, 2.0**-9)
    assert np.isnan(E4M3[0x7F])
    finite = np.delete(np.arange(256), (0x7F, 0xFF))
    assert (to_e4m3(E4M3[finite]) == finite).all()
    # between 16 and 18 lies 17, between 18 and 20 lies 19: both go to the even mantissa
    assert E4M3[to_e4m3(np.array([17.0, 19.0, 500.0, -500.0]))].tolist() == [16, 20, 448, -448]
    assert to_bf16(np.array([1 + 2**-8, 1 + 3 * 2**-8])).tolist() == [1.0, 1 + 2**-6]
    values = np.random.default_rng(0).standard_t(3, size=(5, 96))
    elements, scales = quantize(values)
    assert np.abs(E4M3[elements]).max() > 224  # the least scale that fits
    assert np.abs(decode(elements, scales) - values).max() < np.abs(values).max() / 16
    zeros = quantize(np.zeros((1, 32)))
    assert zeros[1].tolist() == [[0]]
    assert not decode(*zeros).any()


@pytest.mark.parametrize("tactic", TACTICS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_emulation_agrees(name: str, tactic: Tactic) -> None:
    layer = LAYERS[name]
    got = emulate(layer, pack(layer), tactic)
    assert error(got, reference(layer, staged=True)) < STAGED_TOLERANCE
    assert error(got, reference(layer)) < EXACT_TOLERANCE


def test_float32_accumulators_suffice() -> None:
    """The product alone, over a long k: what FP32 accumulation costs."""
    random = np.random.default_rng(3)
    a, a_scales = quantize(random.standard_t(4, size=(70, 2880)))
    b, b_scales = quantize(random.standard_t(4, size=(140, 2880)))
    want = decode(a, a_scales) @ decode(b, b_scales).T
    got = gemm(a, swizzle(a_scales, filler=255), b, swizzle(b_scales), columns=64)
    assert error(got, want) < 1e-6


Codes = npt.NDArray[np.uint8]


def in_rows(scales: Codes, like: Codes) -> Codes:
    """Lay scales out row by row in as much memory as the 128x4 layout takes."""
    rows = np.zeros_like(like)
    flat = scales.reshape(*like.shape[:-1], -1)
    rows[..., : flat.shape[-1]] = flat
    return rows


def wrong(kind: str, layer: Layer, packed: Packed) -> Packed:
    """Prepare a layer as somebody might who got one thing wrong."""
    half = layer.inter
    swapped_scales = np.roll(packed.w13_scales, packed.w13_scales.shape[1] // 2, axis=1)
    replace = dataclasses.replace
    match kind:
        case "w1 and w3 in the checkpoint's order":
            w13, bias13 = (np.roll(each, half, axis=1) for each in (packed.w13, packed.bias13))
            return replace(packed, w13=w13, w13_scales=swapped_scales, bias13=bias13)
        case "w13's scales not swapped with it":
            return replace(packed, w13_scales=swapped_scales)
        case "w13's scales in rows":
            scales = np.concatenate([layer.up[1], layer.gate[1]], axis=1)
            return replace(packed, w13_scales=in_rows(scales, packed.w13_scales))
        case "w2's scales in rows":
            return replace(packed, w2_scales=in_rows(layer.down[1], packed.w2_scales))
        case _:
            return replace(packed, x_scales=in_rows(layer.x[1].ravel(), packed.x_scales))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "kind",
    [
        "w1 and w3 in the checkpoint's order",
        "w13's scales not swapped with it",
        "w13's scales in rows",
        "w2's scales in rows",
        "the tokens' scales in rows",
    ],
)
def test_wrong_preparation_is_noticed(name: str, kind: str) -> None:
    """The control: each mistake is ten times what is tolerated, and more."""
    layer = LAYERS[name]
    got = emulate(layer, wrong(kind, layer, pack(layer)), Tactic(32, swap_ab=True, finalize=True))
    assert error(got, reference(layer)) > 10 * EXACT_TOLERANCE


def test_padded_scales_count_along_k() -> None:
    """Why they must be 0 and not NaN: zeros times NaN are NaN."""
    random = np.random.default_rng(4)
    (a, a_scales), (b, b_scales) = (quantize(random.normal(size=(4, 192))) for _ in "ab")
    good = gemm(a, swizzle(a_scales), b, swizzle(b_scales), columns=32)
    assert np.isfinite(good).all()
    spoilt = swizzle(b_scales)
    spoilt[scale_offset(0, 6, 8)] = 255  # 192 are 6 blocks, the tile has 8
    assert np.isnan(gemm(a, swizzle(a_scales), b, spoilt, columns=32)[:, 0]).all()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")
def test_cutlass_puts_scales_where_we_do(trees: dict[str, Path], tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    source = Path(__file__).with_name("probes") / "probe_scale_layout.cu"
    compile_host(trees["patched"], source, probe, link=True)
    for rows, columns in ((1, 4), (128, 4), (300, 6), (257, 9)):
        done = call(probe, str(rows), str(columns), timeout=TIMEOUT_S)
        said = np.array([line.split() for line in done.stdout.splitlines()], dtype=int)
        ours = [
            [row, column, *[scale_offset(row, column, columns)] * 3]
            for row, column in np.ndindex(rows, columns)
        ]
        assert said.tolist() == ours
