"""The formats of dense layers in float64, written from their definition, to hold an engine against.

OCP Microscaling Formats: 32 elements share a scale that is a power of two, stored as its exponent
plus 127 in a byte (E8M0). E2M1 has an exponent bias of one and no infinities; E4M3 a bias of seven,
no infinities, and one NaN for each sign where its largest value would be.

The definition leaves the choice of the scale to the implementation; the functions here say which
one they take. Nothing in here is fast.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints.tiny import to_bf16
from tests import reference as gptoss

BLOCK = 32

Doubles = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantised tensor [..., K]."""

    codes: npt.NDArray[Any]
    """One element a byte, [..., K]: sign, exponent and mantissa in the low bits; or an integer."""
    scales: npt.NDArray[Any]
    """E8M0, [..., K / 32]; of integers BF16's and of NVFP4 E4M3's values, [..., K / block]."""
    values: Doubles
    """What it stands for, [..., K]."""

    @property
    def packed(self) -> npt.NDArray[np.uint8]:
        """Two four-bit elements a byte, the even one in the low nibble."""
        packed: npt.NDArray[np.uint8] = self.codes[..., 0::2] | self.codes[..., 1::2] << np.uint8(4)
        return packed


def mxfp4(x: npt.NDArray[np.floating]) -> Quantized:
    """Quantise to E2M1 under the scale of least squared error for each block.

    The first to try puts the exponent of the largest magnitude, once that is rounded to the two
    significant bits of an element, on the largest exponent an element has (two). Another has to be
    better, by however little. Zeros get the smallest scale there is.
    """
    blocks = _blocks(x)
    largest = np.abs(blocks).max(axis=-1)
    fraction, exponent = np.frexp(largest)  # fraction in [0.5, 1)
    # Two significant bits: 0.5, 0.75, 1; a tie goes away from zero.
    carries = np.floor(fraction * 4 + 0.5) >= 4
    first = np.where(largest > 0, np.maximum(exponent - 1 + carries - 2, -127), -127)
    best = first.copy()
    tries = {shift: _quantize(blocks, first + shift, E2M1) for shift in (0, -1, 1, -2, 2)}
    squares = {
        shift: np.square((tried.values.reshape(blocks.shape) - blocks) / np.exp2(first)[..., None])
        for shift, tried in tries.items()
    }
    for place in np.ndindex(first.shape):
        least = 0
        for shift in (-1, 1, -2, 2):
            # fsum rounds once, so that its sign is right; the squares are exact.
            differs = math.fsum((*squares[shift][place], *-squares[least][place]))
            if differs < 0 and -127 <= first[place] + shift <= 127:
                least = shift
        best[place] += least
    return _quantize(blocks, best, E2M1)


def mxfp8(x: npt.NDArray[np.floating]) -> Quantized:
    """Quantise to E4M3. The scale is the smallest with which the largest magnitude fits."""
    blocks = _blocks(x)
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=-1) / E4M3[-1])
    exponents = np.where(fraction > 0.5, exponent, exponent - 1)
    return _quantize(blocks, exponents, E4M3)


def integers(x: npt.NDArray[np.floating], top: int, block: int) -> Quantized:
    """Quantise to integers. The BF16 scale is the largest magnitude of a block / the largest
    integer, at least the smallest normal number."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, block)
    largest = np.abs(blocks).max(axis=-1)
    scales = np.maximum(bf16(largest.astype(np.float32) / np.float32(top)), np.float32(2.0**-126))
    factors = scales.astype(np.float64)[..., None]
    codes = np.rint(blocks / factors)
    assert np.abs(codes).max() <= top
    scales = np.where(largest > 0, scales, 0).astype(np.float32)
    values = (codes * factors).reshape(x.shape)
    return Quantized(codes.reshape(x.shape).astype(np.int8), scales, values)


def int8(x: npt.NDArray[np.floating]) -> Quantized:
    """Quantise to integers of up to 127 under scales of 64."""
    return integers(x, 127, 64)


def int6(x: npt.NDArray[np.floating]) -> Quantized:
    """Quantise to integers of up to 31 under scales of 32."""
    return integers(x, 31, 32)


def nvfp4(x: npt.NDArray[np.floating]) -> Quantized:
    """Quantise to E2M1 under E4M3 scales of 16 elements, each of which brings the largest to 6 or
    is 2**-6, and one float32 factor for all, which brings the largest scale to 448."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    largest = np.abs(blocks).max(axis=-1)
    factor = np.maximum(largest.max() / np.float32(6 * 448), np.finfo(np.float32).tiny)
    wanted = (largest / np.float32(6) / factor).astype(np.float64)
    scales = E4M3[_nearest(np.clip(wanted, 2.0**-6, 448), E4M3)].astype(np.float32)[..., None]
    codes = _nearest((np.abs(blocks) / (scales * factor)).astype(np.float64), E2M1)
    values = np.copysign(E2M1[codes] * scales * float(factor), blocks).reshape(x.shape)
    signed = (codes | np.signbit(blocks) << 3).astype(np.uint8).reshape(x.shape)
    return Quantized(signed, scales[..., 0], values)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest BF16 numbers."""
    return (to_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)


def scale_offset(row: int, column: int, columns: int) -> int:
    """Return the place of one scale in the 128x4 layout of a matrix with so many of them a row.

    As test_flashinfer_moe_sources.py asks CUTLASS and FlashInfer.
    """
    tile = row // 128 * -(-columns // 4) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


QUANTIZERS = {"mxfp4": mxfp4, "mxfp8": mxfp8, "int8": int8, "int6": int6, "nvfp4": nvfp4}


def quantize_layers(model: gptoss.Model, formats: dict[str, str]) -> gptoss.Model:
    """The model with dense layers quantised.

    Args:
        model: Any gpt-oss model.
        formats: of ``QUANTIZERS``, for some of "qkv", "o" and "lm_head".
    """
    # q, k and v are one weight
    weights: dict[tuple[str, str], list[str]] = {}
    for name in model.tensors:
        if (kind := layer_kind(name)) in formats:
            weights.setdefault((kind, name.partition(".self_attn.")[0]), []).append(name)
    assert {kind for kind, _ in weights} == set(formats)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for (kind, _), names in weights.items():
        parts = [model.tensors[name] for name in names]
        values = QUANTIZERS[formats[kind]](np.concatenate(parts)).values.astype(np.float32)
        split = np.split(values, np.cumsum([len(part) for part in parts])[:-1])
        tensors |= dict(zip(names, split, strict=True))
    return model.replaced(tensors=tensors)


def layer_kind(name: str) -> str:
    """The kind of layer that a tensor of a checkpoint is the weight of; "" for all others."""
    if name == "lm_head.weight":
        return "lm_head"
    if name.endswith("self_attn.o_proj.weight"):
        return "o"
    if name.endswith(tuple(f"self_attn.{p}_proj.weight" for p in "qkv")):
        return "qkv"
    return ""


def _blocks(x: npt.NDArray[np.floating]) -> Doubles:
    return x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _values(*, exponent_bits: int, mantissa_bits: int, bias: int) -> Doubles:
    """The magnitudes of a small float in the order of their codes, which is that of size."""
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes % (1 << mantissa_bits)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1 + fraction) * np.exp2(exponent - float(bias))
    return np.where(exponent > 0, normal, fraction * 2.0 ** (1 - bias))


def _nearest(magnitudes: Doubles, values: Doubles) -> npt.NDArray[np.int64]:
    """The places of the nearest of `values`, ties to the even one."""
    upper = np.clip(np.searchsorted(values, magnitudes), 1, len(values) - 1)
    to_lower, to_upper = magnitudes - values[upper - 1], values[upper] - magnitudes
    takes_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (upper % 2 == 1))
    return np.where(takes_lower, upper - 1, upper)


def _quantize(blocks: Doubles, exponents: npt.NDArray[np.integer], values: Doubles) -> Quantized:
    """Round to the nearest of `values` under the scales, ties to the even code, beyond the largest
    to the largest."""
    scales = np.clip(exponents + 127, 0, 254).astype(np.uint8)
    factors = np.exp2(scales.astype(np.float64) - 127)[..., None]
    codes = _nearest(np.abs(blocks) / factors, values)  # exact: a power of two
    negative = np.signbit(blocks)
    shape = (*blocks.shape[:-2], -1)
    signed = np.where(negative, -values[codes], values[codes]) * factors
    # The sign stands above the exponent and the mantissa, wherever those end: the NaN codes left
    # out of `values` count too.
    sign = np.uint8(1 << (len(values) - 1).bit_length())
    return Quantized(
        codes=(codes.astype(np.uint8) | negative * sign).reshape(shape),
        scales=scales,
        values=signed.reshape(shape),
    )


E2M1 = _values(exponent_bits=2, mantissa_bits=1, bias=1)
E4M3 = _values(exponent_bits=4, mantissa_bits=3, bias=7)[:-1]  # the last code is NaN
