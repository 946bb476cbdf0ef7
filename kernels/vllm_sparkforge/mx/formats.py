# SPDX-License-Identifier: Apache-2.0
"""Quantisers in plain torch: every device gives the same bytes.

An MX format has one scale, a power of two (E8M0), for 32 elements (OCP, Microscaling Formats 1.0).
INT8 has one in BF16 for 64, INT6 for 32. NVFP4 has one in E4M3 for 16 and a factor in FP32.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 32
INT8_BLOCK = 64
NVFP4_BLOCK = 16
# Elements that are quantized at once, however large the tensor is: 4 MiB for each float32
# intermediate. On a CPU slices of 16 Mi take three to four times as long.
_SLICE_ELEMS = 1024 * 1024
_E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _mxfp4_to_bf16_bits(code: int, scale: int) -> int:
    """BF16 bits of the E2M1 value ``code`` times ``2 ** (scale - 127)``."""
    if scale == 0xFF:
        return 0x7FC0  # E8M0 has one NaN
    sign = (code & 8) << 12
    # The value is halves * 2**-1; every product with a scale has at most two
    # significant bits, so nothing below is rounded.
    halves = (0, 1, 2, 3, 4, 6, 8, 12)[code & 7]
    if halves == 0:
        return sign
    shift = halves.bit_length() - 1
    exponent = scale - 1 + shift
    if exponent >= 0xFF:
        return sign | 0x7F80
    if exponent > 0:
        return sign | exponent << 7 | (halves << 7 >> shift) & 0x7F
    return sign | halves << (scale + 5)  # subnormal, in units of 2**-133


@cache
def _mxfp4_to_bf16_table(device: torch.device) -> torch.Tensor:
    """The two BF16 values of every packed byte under every scale, as one int32
    in memory order, at index ``scale << 8 | byte``.

    Built from bits: floating point could flush the subnormal products to zero.
    """
    bits = torch.tensor(
        [[_mxfp4_to_bf16_bits(c, s) for c in range(16)] for s in range(256)],
        dtype=torch.int32,
        device=device,
    ).to(torch.int16)
    low = bits[:, None, :].expand(256, 16, 16)
    high = bits[:, :, None].expand(256, 16, 16)
    return torch.stack((low, high), dim=-1).view(torch.int32).flatten()


def mxfp4_dequantize(
    blocks: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize MXFP4 to BF16, without rounding.

    A NaN scale gives NaN. A product beyond BF16's range, which takes a scale of
    0xFD or 0xFE, gives an infinity.

    Args:
        blocks: uint8 [..., K // 2], the even element in the low nibble.
        scales: uint8 (E8M0) [..., K // 32].
        out: Contiguous bfloat16 [..., K] to write to, allocated if None.

    """
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks.shape == (*scales.shape[:-1], scales.shape[-1] * 16)
    if out is None:
        size = (*blocks.shape[:-1], blocks.shape[-1] * 2)
        out = torch.empty(size, dtype=torch.bfloat16, device=blocks.device)
    assert out.dtype == torch.bfloat16 and out.is_contiguous()
    index = blocks.to(torch.int32).view(*scales.shape, 16)
    index += scales.to(torch.int32).unsqueeze(-1) << 8
    torch.index_select(
        _mxfp4_to_bf16_table(blocks.device),
        0,
        index.flatten(),
        out=out.view(torch.int32).view(-1),
    )
    return out


def _half_is_better(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compare the squared errors of blocks under two scales, in any order of
    summation the same.

    In units of half the larger scale, E2M1's values are 0, 1, 2, 3, 4, 6, 8, 12
    under the larger scale and 0, 0.5, 1, 1.5, 2, 3, 4, 6 under the smaller. So
    from 2 to 7 both round alike. Below 2 the smaller gains d**2 - (d - 0.5)**2 =
    d - 0.25 where the distance d to an integer is above 0.25. Above 7 it loses
    (y - 6)**2 - (y - 8)**2 = 4 * (y - 7); above 10 more than that, but there the
    31 others cannot make up for it.

    These terms have no more bits than the elements, so their sum is exact in
    float32 for bfloat16 and float16, in float64 for float32.

    Args:
        sizes: Magnitudes in that unit, float32 [..., 32].
        dtype: What to sum in.

    Returns:
        Whether the error is smaller under the smaller scale, bool [...].

    """
    gain = sizes.clamp(max=2)
    gain.sub_(gain.round()).abs_().sub_(0.25).clamp_(min=0)
    gain.sub_(sizes.sub(7).clamp_(min=0), alpha=4)
    return gain.sum(dim=-1, dtype=dtype) > 0


def _e2m1(sizes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Round to E2M1, ties to even, what is beyond 6 to 6; two codes a byte.

    Args:
        sizes: Magnitudes, doubled, float32 [N, B, block]; overwritten.
        blocks: Of these signs.

    """
    # Codes are the steps of 0.5 up to 2, then of 1, then of 2.
    codes = sizes.round()
    torch.minimum(codes, sizes.mul(0.5).round_().add_(2), out=codes)
    torch.minimum(codes, sizes.mul_(0.25).round_().add_(4), out=codes)
    codes = codes.clamp_(max=7).to(torch.uint8)
    codes |= torch.signbit(blocks).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP4 along the last dimension, in plain torch.

    Every device gives the same bytes. The scale of a block is the power of two
    of least squared error. It is one of two: that which puts the largest
    magnitude between 3.5 and 7 in units of the scale, as ``downcast_to_mxfp``
    has it, or half of that where the error is smaller. (A larger one rounds
    everything below 7 to the same values or to values further off. A smaller one
    cuts the largest to 1.5 or less, for which finer steps cannot make up.)
    Elements round to nearest, ties to even; beyond 6 they are cut to 6. Zeros
    keep their sign. Scales end at 2**-127.

    Args:
        x: Finite bfloat16, float16 or float32 [..., K], K a multiple of 32.

    Returns:
        Packed elements, uint8 [..., K // 2], the even element in the low
        nibble, and scales, uint8 (E8M0) [..., K // 32].

    """
    assert x.shape[-1] % 32 == 0
    rows = x.reshape(-1, x.shape[-1])
    packed = torch.empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows.shape[0], rows.shape[1] // 32, dtype=torch.uint8, device=x.device)
    sum_dtype = torch.float64 if x.dtype == torch.float32 else torch.float32
    num_rows = max(1, _SLICE_ELEMS // rows.shape[1])
    for start in range(0, rows.shape[0], num_rows):
        part = slice(start, start + num_rows)
        blocks = rows[part].unflatten(-1, (-1, 32))
        sizes = blocks.abs().to(torch.float32)
        largest = sizes.amax(dim=-1).view(torch.int32)
        # The exponent of the largest, once that is rounded to two bits (a carry
        # moves into it), less two. Zero and subnormals get the smallest scale.
        exponent = (((largest + 0x200000) >> 23) - 2).clamp_(min=0)
        # Two over the scale, 2**(128 - exponent), from its bits: normal for
        # every exponent but 0, which has no half, so that the product is exact
        # wherever it can matter.
        sizes *= ((255 - exponent.clamp(min=1)) << 23).view(torch.float32).unsqueeze(-1)
        half = _half_is_better(sizes, sum_dtype) & (exponent > 0)
        scales[part] = exponent - half.to(torch.int32)
        # Now 2y / scale for every block; with exponent 0 it was y / scale.
        sizes *= torch.where(half | (exponent == 0), 2.0, 1.0).unsqueeze(-1)
        packed[part] = _e2m1(sizes, blocks)
    return (
        packed.view(*x.shape[:-1], packed.shape[-1]),
        scales.view(*x.shape[:-1], scales.shape[-1]),
    )


def mxfp8_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [N, K] to MXFP8, a slice at a time.

    The scale is the smallest power of two with which nothing in the block is cut off.

    Returns:
        Elements, float8_e4m3fn [N, K], and scales, uint8 (E8M0) [N, K // 32].
    """
    rows, columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    step = max(1, _SLICE_ELEMS // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        blocks = weight[part].to(torch.float32).unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        exponent = (torch.ceil(torch.log2(largest / _E4M3_MAX)) + 127.0).clamp(0, 254)
        scaled = blocks / torch.exp2(exponent - 127.0).unsqueeze(-1)
        values[part] = scaled.flatten(-2).to(torch.float8_e4m3fn)
        scales[part] = exponent.to(torch.uint8)
    return values, scales


def mxfp8_dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand MXFP8 (float8_e4m3fn [N, K], E8M0 [N, K // 32]) to bfloat16."""
    factors = torch.exp2(scales.to(torch.float32) - 127.0).unsqueeze(-1)
    blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK)) * factors
    return blocks.flatten(-2).to(torch.bfloat16)


def _integers(weight: torch.Tensor, top: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [N, K] to integers, a slice at a time.

    The scale is the largest magnitude / ``top``, rounded to BF16; zero for zeros, otherwise normal.
    Elements round to nearest, ties to even: none beyond ``top``, since the largest is 0.2 % more at
    most. (The best of some scales has a smaller error, and a trained model no smaller divergence:
    benchmarks/formats.py.)

    Returns:
        Elements, int8 [N, K], and scales, bfloat16 [N, K // block].
    """
    rows, columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty((rows, columns // block), dtype=torch.bfloat16)
    step = max(1, _SLICE_ELEMS // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        blocks = weight[part].to(torch.float32).unflatten(-1, (-1, block))
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        # by a tensor: CUDA multiplies by the inverse of a number
        scale = (largest / torch.full_like(largest, top)).to(torch.bfloat16)
        scale.clamp_(min=torch.finfo(torch.bfloat16).tiny)
        values[part] = (blocks / scale).round_().flatten(-2).to(torch.int8)
        scales[part] = torch.where(largest > 0, scale, 0).squeeze(-1)
    return values, scales


def int8_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [N, K] to INT8, see ``_integers``."""
    return _integers(weight, 127, INT8_BLOCK)


def int6_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [N, K] to INT6, see ``_integers``."""
    return _integers(weight, 31, BLOCK)


def int8_dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand INT8 or INT6 (int8 [N, K], bfloat16 [N, K // block]) to bfloat16; only that rounds."""
    block = values.shape[1] // scales.shape[1]
    blocks = values.to(torch.float32).unflatten(-1, (-1, block)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).to(torch.bfloat16)


def nvfp4_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight [N, K] to NVFP4, a slice at a time.

    The factor brings the largest magnitude of the weight to 6 * 448; the scale that of the block to
    6, rounded to nearest, at least 2**-6, which is normal. Elements round as MXFP4's do.

    Returns:
        Packed elements, uint8 [N, K // 2], the even element in the low nibble, scales,
        float8_e4m3fn [N, K // 16], and the factor, float32 [].
    """
    rows, columns = weight.shape
    packed = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    scales = weight.new_empty((rows, columns // NVFP4_BLOCK), dtype=torch.float8_e4m3fn)
    largest = torch.stack(torch.aminmax(weight)).abs().amax().to(torch.float32)
    factor = largest / torch.full_like(largest, _E2M1[-1] * _E4M3_MAX)
    factor.clamp_(min=torch.finfo(torch.float32).tiny)
    step = max(1, _SLICE_ELEMS // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        blocks = weight[part].to(torch.float32).unflatten(-1, (-1, NVFP4_BLOCK))
        sizes = blocks.abs()
        largest = sizes.amax(dim=-1)
        scale = largest / torch.full_like(largest, _E2M1[-1]) / factor
        scales[part] = scale.clamp_(2.0**-6, _E4M3_MAX).to(torch.float8_e4m3fn)
        sizes /= (scales[part].to(torch.float32) * factor).unsqueeze(-1)
        sizes *= 2
        packed[part] = _e2m1(sizes, blocks)
    return packed, scales, factor


def nvfp4_dequantize(
    packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """Expand NVFP4 (see ``nvfp4_quantize``) to bfloat16."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    values = torch.cat((table, -table))[codes].unflatten(-1, (-1, NVFP4_BLOCK))
    values *= scales.to(torch.float32).unsqueeze(-1)  # exact
    return (values * factor).flatten(-2).to(torch.bfloat16)
