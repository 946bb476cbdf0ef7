"""An MXFP8 x MXFP8 MoE layer twice, in numpy: from the formats, and as the SM12x module does it.

``reference`` is the layer in float64, from the definitions: E4M3 elements, one E8M0 scale for 32 of
them (OCP Microscaling), SwiGLU, a weighted sum over the experts of a token.

``emulate`` goes the way of FlashInfer's module on SM12x: operands and scales as bytes in memory,
tiles, one block-scaled MMA for 32 k with float32 accumulators, the roundings between the kernels,
either epilogue. It is what the kernels should compute, read from their sources; **nothing of it was
run on SM12x**. How a tensor core rounds inside one MMA is not known: here the 32 products are added
exactly and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
"""Elements along k that share a scale."""
SCALE_ROWS, SCALE_COLUMNS = 128, 4
"""Scales are stored in tiles of 128 rows by 4 blocks: 512 bytes one after the other."""
_E4M3_MAX = 448.0


# -- formats ---------------------------------------------------------------------


def _e4m3_values() -> Floats:
    """All 256 codes of E4M3 (bias 7, no infinities, S.1111.111 is NaN)."""
    values = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        ones = mantissa / 8 + (exponent != 0)
        size = ones * 2.0 ** (max(exponent, 1) - 7)
        values[code] = np.nan if code & 127 == 127 else (-1) ** sign * size
    return values


E4M3 = _e4m3_values()


def to_e4m3(values: Floats) -> Bytes:
    """Round to the nearest E4M3, ties to even, beyond 448 to 448."""
    size = np.minimum(np.abs(values), _E4M3_MAX)
    positive = E4M3[:127]
    above = np.searchsorted(positive, size).clip(1, 126)
    low, high = positive[above - 1], positive[above]
    nearer = np.where(size - low == high - size, above % 2 == 1, size - low < high - size)
    code = np.where(nearer, above - 1, above)
    return (code + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def e8m0(codes: Bytes) -> Floats:
    """Powers of two from 2^-127; 255 is NaN."""
    return np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127))


def to_bf16(values: npt.NDArray[Any]) -> Singles:
    """Round float32 to BF16, ties to even, and keep it as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def quantize(values: npt.NDArray[Any]) -> tuple[Bytes, Bytes]:
    """Quantise rows to MXFP8 as FlashInfer does.

    The scale is the least power of two that brings a block's greatest value to 448 or below.

    Args:
        values: [..., k], k a multiple of 32.

    Returns:
        Elements [..., k] and scales [..., k / 32], both as bytes.
    """
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, BLOCK)
    greatest = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(greatest / _E4M3_MAX)).clip(-127, 127)
    scales = (exponent + 127).astype(np.uint8)
    elements = to_e4m3(blocks / e8m0(scales)[..., None])
    return elements.reshape(values.shape), scales


def decode(elements: Bytes, scales: Bytes) -> Floats:
    """Return what MXFP8 elements [..., k] and scales [..., k / 32] stand for."""
    return E4M3[elements] * np.repeat(e8m0(scales), BLOCK, axis=-1)


# -- where scales are ------------------------------------------------------------


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def scale_offset(row: int, column: int, columns: int) -> int:
    """Return the place of one scale in the 128x4 layout of a matrix with so many of them a row."""
    tiles = -(-columns // SCALE_COLUMNS)
    tile = row // SCALE_ROWS * tiles + column // SCALE_COLUMNS
    inside = row % 32 * 16 + row % SCALE_ROWS // 32 * 4 + column % SCALE_COLUMNS
    return tile * SCALE_ROWS * SCALE_COLUMNS + inside


def swizzle(scales: Bytes, filler: int = 0) -> Bytes:
    """Store scales [rows, columns] in the 128x4 layout; what pads it gets ``filler``.

    Columns are padded with 0, which the kernels promise: there k goes on, and a NaN would count.
    """
    rows, columns = scales.shape
    size = round_up(rows, SCALE_ROWS) * round_up(columns, SCALE_COLUMNS)
    memory = np.full(size, filler, dtype=np.uint8)
    for row in range(rows):
        for column in range(round_up(columns, SCALE_COLUMNS)):
            value = scales[row, column] if column < columns else 0
            memory[scale_offset(row, column, columns)] = value
    return memory


# -- the layer -------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """SwiGLU; with a limit, gpt-oss's, as ``swiglu_alpha``, ``_beta`` and ``_limit`` give it."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = np.inf

    def __call__(self, gate: npt.NDArray[Any], up: npt.NDArray[Any]) -> npt.NDArray[Any]:
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        sigmoid = (1 + np.tanh(self.alpha * gate / 2)) / 2
        result: npt.NDArray[Any] = gate * sigmoid * (up + self.beta)
        return result.astype(gate.dtype)


@dataclass(frozen=True)
class Layer:
    """Quantised operands of a layer and its routing."""

    x: tuple[Bytes, Bytes]
    """Tokens, elements [tokens, hidden] and scales [tokens, hidden / 32]."""
    gate: tuple[Bytes, Bytes]
    up: tuple[Bytes, Bytes]
    """``gate``, ``up``: w1 and w3, [experts, inter, hidden] and scales."""
    down: tuple[Bytes, Bytes]
    """W2, [experts, hidden, inter] and scales."""
    gate_bias: Singles
    up_bias: Singles
    down_bias: Singles
    """``gate_bias``, ``up_bias``, ``down_bias``: [experts, rows]."""
    global1: Singles
    global2: Singles
    """``global1``, ``global2``: factor of each expert's products, [experts]."""
    experts: npt.NDArray[np.int64]
    """Those of a token, [tokens, top k]; weights: their shares."""
    weights: Singles
    activation: Activation

    @property
    def hidden(self) -> int:
        return int(self.x[0].shape[1])

    @property
    def inter(self) -> int:
        return int(self.gate[0].shape[1])


def make_layer(
    seed: int,
    *,
    tokens: int,
    experts: int,
    hidden: int,
    inter: int,
    top_k: int,
    activation: Activation,
    bias: float,
    expert_share: Sequence[float] | None = None,
) -> Layer:
    """Make a layer of random, heavy-tailed weights whose blocks differ in size."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> tuple[Bytes, Bytes]:
        *rows, k = shape
        sizes = np.exp2(random.integers(-5, 2, size=(*rows, k // BLOCK, 1)))
        values = random.standard_t(5, size=(*rows, k // BLOCK, BLOCK)) * sizes
        return quantize(values.reshape(shape) / np.sqrt(k))

    chosen = np.stack(
        [random.choice(experts, size=top_k, replace=False, p=expert_share) for _ in range(tokens)]
    )
    weights = random.dirichlet(np.ones(top_k), size=tokens)

    def biases(rows: int) -> Singles:
        return to_bf16(bias * random.standard_normal((experts, rows)))

    return Layer(
        x=quantize(random.standard_t(5, size=(tokens, hidden))),
        gate=matrix(experts, inter, hidden),
        up=matrix(experts, inter, hidden),
        down=matrix(experts, hidden, inter),
        gate_bias=biases(inter),
        up_bias=biases(inter),
        down_bias=biases(hidden),
        global1=np.exp2(random.integers(-1, 2, experts)).astype(np.float32),
        global2=np.exp2(random.integers(-1, 2, experts)).astype(np.float32),
        experts=chosen,
        weights=weights.astype(np.float32),
        activation=activation,
    )


def reference(layer: Layer, *, staged: bool = False) -> Floats:
    """Compute the layer in float64, [tokens, hidden].

    Args:
        staged: round where the module does between its kernels (BF16 after the first product,
            BF16 and MXFP8 after the activation), so that only the arithmetic inside them differs.
    """
    x = decode(*layer.x)
    gate, up, down = (decode(*each) for each in (layer.gate, layer.up, layer.down))
    out = np.zeros((len(x), layer.hidden))
    for token, chosen in enumerate(layer.experts):
        for share, expert in zip(layer.weights[token], chosen, strict=True):
            g = gate[expert] @ x[token] * layer.global1[expert]
            u = up[expert] @ x[token] * layer.global1[expert]
            if staged:
                g, u = to_bf16(g).astype(np.float64), to_bf16(u).astype(np.float64)
            inner = layer.activation(g + layer.gate_bias[expert], u + layer.up_bias[expert])
            if staged:
                inner = decode(*quantize(to_bf16(inner)))
            y = down[expert] @ inner * layer.global2[expert] + layer.down_bias[expert]
            out[token] += np.float64(share) * y
    return out


# -- the module ------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """What a caller of ``cutlass_fused_moe`` passes, as bytes."""

    x: Bytes
    x_scales: Bytes
    """128x4 layout."""
    w13: Bytes
    """[experts, 2 inter, hidden], w3's rows first; w13_scales: [experts, bytes], each 128x4."""
    w13_scales: Bytes
    w2: Bytes
    w2_scales: Bytes
    """``w2``, ``w2_scales``: the same of w2."""
    bias13: Singles
    """[experts, 2 inter], w3's first."""


def pack(layer: Layer) -> Packed:
    """Prepare a layer for the module; hidden and inter must be multiples of 64, inter of 128."""
    assert layer.hidden % 64 == 0
    assert layer.inter % 128 == 0
    w13 = np.concatenate([layer.up[0], layer.gate[0]], axis=1)
    w13_scales = np.concatenate([layer.up[1], layer.gate[1]], axis=1)
    return Packed(
        x=layer.x[0],
        x_scales=swizzle(layer.x[1]),
        w13=w13,
        w13_scales=np.stack([swizzle(each) for each in w13_scales]),
        w2=layer.down[0],
        w2_scales=np.stack([swizzle(each) for each in layer.down[1]]),
        bias13=np.concatenate([layer.up_bias, layer.gate_bias], axis=1),
    )


@dataclass(frozen=True)
class Tactic:
    """One kernel of the module."""

    columns: int
    """N of the tile 128 x N x 128."""
    swap_ab: bool
    """The weights are A and the tokens B, and the result is transposed."""
    finalize: bool
    """The second product's epilogue adds into the output, else a kernel after it does."""


TILE_ROWS, TILE_K = 128, 128


def _scale_tile(memory: Bytes, row: int, k_tile: int, k_tiles: int, rows: int) -> Singles:
    """Return the scales [rows, 4] of a tile: its 512 bytes, read as they lie.

    A tile of 32 or 64 rows begins inside such a chunk, which is loaded whole.
    """
    chunk = (row // SCALE_ROWS * k_tiles + k_tile) * SCALE_ROWS * SCALE_COLUMNS
    size = SCALE_ROWS * SCALE_COLUMNS
    lying = memory[chunk : chunk + size].reshape(32, 4, SCALE_COLUMNS)  # row % 32, row // 32, k
    tile = lying.transpose(1, 0, 2).reshape(SCALE_ROWS, SCALE_COLUMNS)
    return e8m0(tile[row % SCALE_ROWS : row % SCALE_ROWS + rows]).astype(np.float32)


def _tile(matrix: Bytes, row: int, rows: int, k: int) -> Floats:
    """Return a tile's elements; beyond the matrix TMA fills in zeros."""
    tile = np.zeros((rows, TILE_K))
    inside = E4M3[matrix[row : row + rows, k : k + TILE_K]]
    tile[: inside.shape[0], : inside.shape[1]] = inside
    return tile


def gemm(a: Bytes, a_scales: Bytes, b: Bytes, b_scales: Bytes, columns: int) -> Singles:
    """Multiply A [m, k] by B [n, k] transposed, tile by tile, into float32 accumulators [m, n]."""
    (m, k), n = a.shape, b.shape[0]
    k_tiles = -(-k // TILE_K)
    out = np.empty((m, n), dtype=np.float32)
    for row in range(0, m, TILE_ROWS):
        for column in range(0, n, columns):
            accumulator = np.zeros((TILE_ROWS, columns), dtype=np.float32)
            for k_tile in range(k_tiles):
                left = _tile(a, row, TILE_ROWS, k_tile * TILE_K)
                right = _tile(b, column, columns, k_tile * TILE_K)
                left_scales = _scale_tile(a_scales, row, k_tile, k_tiles, TILE_ROWS)
                right_scales = _scale_tile(b_scales, column, k_tile, k_tiles, columns)
                for step in range(TILE_K // BLOCK):  # one MMA of k 32, one scale of a row for it
                    span = slice(step * BLOCK, (step + 1) * BLOCK)
                    products = left[:, span] @ right[:, span].T  # exact in float64
                    factor = left_scales[:, step, None] * right_scales[None, :, step]
                    accumulator += (products * factor).astype(np.float32)
            rows, cut = min(TILE_ROWS, m - row), min(columns, n - column)
            out[row : row + rows, column : column + cut] = accumulator[:rows, :cut]
    return out


def emulate(layer: Layer, packed: Packed, tactic: Tactic) -> Singles:
    """Compute the layer as the module does, [tokens, hidden] in BF16."""
    tokens, top_k = layer.experts.shape
    columns_in = layer.hidden // BLOCK
    out = np.zeros((tokens, layer.hidden), dtype=np.float32)
    unreduced = np.zeros((tokens, top_k, layer.hidden), dtype=np.float32)
    for expert in range(len(packed.w13)):
        places = np.argwhere(layer.experts == expert)
        if not len(places):
            continue
        # expandInputRows: rows and, out of the one layout into the expert's own, their scales
        rows = packed.x[places[:, 0]]
        scales = np.array(
            [
                [
                    packed.x_scales[scale_offset(token, column, columns_in)]
                    for column in range(columns_in)
                ]
                for token in places[:, 0]
            ]
        )
        first = _product(
            rows, _with_garbage(scales), packed.w13[expert], packed.w13_scales[expert], tactic
        )
        first = to_bf16(first * layer.global1[expert])
        # doActivation: the linear half first, then the gate
        halves = first + packed.bias13[expert]
        inner = layer.activation(halves[:, layer.inter :], halves[:, : layer.inter])
        elements, inner_scales = quantize(to_bf16(inner))
        second = _product(
            elements,
            _with_garbage(inner_scales),
            packed.w2[expert],
            packed.w2_scales[expert],
            tactic,
        )
        second *= layer.global2[expert]
        for row, (token, slot) in zip(second, places, strict=True):
            if tactic.finalize:
                scaled = layer.weights[token, slot] * (row + layer.down_bias[expert])
                out[token] = to_bf16(out[token] + to_bf16(scaled))  # an atomic addition in BF16
            else:
                unreduced[token, slot] = to_bf16(row)
    if tactic.finalize:
        return out
    # finalizeMoeRouting: in float32, rounded once
    for token, slot in np.ndindex(tokens, top_k):
        expert = layer.experts[token, slot]
        out[token] += layer.weights[token, slot] * (
            unreduced[token, slot] + layer.down_bias[expert]
        )
    return to_bf16(out)


def _with_garbage(scales: Bytes) -> Bytes:
    """Store an expert's scales; rows beyond its tokens hold what was there before, here NaN."""
    return swizzle(scales, filler=255)


def _product(x: Bytes, x_scales: Bytes, w: Bytes, w_scales: Bytes, tactic: Tactic) -> Singles:
    if tactic.swap_ab:
        return gemm(w, w_scales, x, x_scales, tactic.columns).T.copy()
    return gemm(x, x_scales, w, w_scales, tactic.columns)
