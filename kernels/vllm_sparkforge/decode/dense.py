# SPDX-License-Identifier: Apache-2.0
"""Dense layers for few rows: MXFP4, MXFP8, INT8 and BF16 weights, BF16 activations.

Quantized weights are packed once into tiles of 16 rows x 64 columns (see
``kernels/csrc/dense.cuh``); for many rows they are expanded to BF16 in a
scratch buffer. BF16 weights stay as they are. A row's result depends neither on the
rows beside it nor on their number, up to ``MX_ROWS`` of them (``bf16.MAX_ROWS`` with BF16
weights) and above.
"""

import torch
import torch.nn.functional as F

from vllm_sparkforge import ops
from vllm_sparkforge.decode import module

TILE_N, TILE_K = 16, 64
LAUNCH_ROWS = 16
"""Rows of one launch."""
MX_ROWS = 64
"""Rows up to which quantized weights are not expanded. On a Spark bytes decide: to expand costs a
read of the weight, and its BF16 written and read, as much as 4.9 reads of 8 bits, 8.5 of 4; these
are four. (On an H200, which caches the BF16, qkv and o are faster expanded from 33 rows on.)"""
EXPANDED_N = 16384
"""Weight rows that are expanded at once."""
LARGEST_SCALE = 190
"""Largest E8M0 scale that the kernels' arithmetic takes: 2 ** 63, as of BF16 scales."""
_WIDE_N = 65536
"""Weight rows above which each multiprocessor takes many of them."""
_PACKED_ELEMS = 8 * 1024 * 1024
"""Elements that are packed at once: the temporaries are some 32 bytes an element."""


def pack(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a weight into the tiles that the kernels read.

    Args:
        weight: MXFP4 as uint8 [N, K // 2], the even element in the low nibble,
            MXFP8 as float8_e4m3fn [N, K] or INT8 as int8 [N, K]; K a multiple of 64.
        scale: E8M0 as uint8 or float8_e8m0fnu [N, K // 32]; INT8: bfloat16 [N, K // 64].

    Returns:
        int32 [B, K // 64, 32, 4] for MXFP4, [B, K // 64, 2, 32, 4] for the others, and
        of scales uint8 [B, K // 64, 8, 2, 2], INT8: bfloat16 [B, K // 64, 8, 2, 1]; B is
        N / 16, rounded up. Rows that fill the last tile are zero.

    """
    mxfp4, int8 = weight.dtype == torch.uint8, weight.dtype == torch.int8
    tiles = columns(weight) // TILE_K
    weight = weight.view(torch.uint8)
    scale, each = (scale, 1) if int8 else (scale.view(torch.uint8), 2)
    blocks = -(-weight.shape[0] // TILE_N)
    shape = (32, 4) if mxfp4 else (2, 32, 4)
    words = weight.new_empty((blocks, tiles, *shape), dtype=torch.int32)
    scales = scale.new_empty((blocks, tiles, 8, 2, each))
    pack_tiles = _pack_mxfp4 if mxfp4 else _pack_int8 if int8 else _pack_mxfp8
    step = max(1, _PACKED_ELEMS // (TILE_N * TILE_K * tiles))
    for block in range(0, blocks, step):
        some = slice(block, min(block + step, blocks))
        rows = slice(TILE_N * some.start, TILE_N * some.stop)
        missing = TILE_N * (some.stop - some.start) - weight[rows].shape[0]
        padding = (0, 0, 0, missing)
        words[some] = pack_tiles(F.pad(weight[rows], padding), tiles).view(-1, tiles, *shape)
        # row 8r + g, group 2t + h (INT8: t): block t g r h
        groups = F.pad(scale[rows], padding).view(-1, 2, 8, tiles, each)
        scales[some] = groups.permute(0, 3, 2, 1, 4)
    return words, scales


def _pack_mxfp4(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    # row 8r + g; a byte is column 64t + 32h + 8q + 2j and the next
    code = torch.stack([weight & 15, weight >> 4], -1).view(-1, 2, 8, tiles, 2, 4, 4, 2)
    half = torch.zeros_like(code[..., 0, :], dtype=torch.int32)
    for j in range(4):
        sign, exponent, mantissa = (14, 10, 13) if j == 3 else (15 - 3 * j, 7 - 3 * j, 6 - 3 * j)
        some = code[..., j, :].to(torch.int32)
        half |= (some >> 3) << sign
        half |= (some >> 1 & 3) << exponent
        half |= (some & 1) << mantissa
    # block t g q h r, then the two halves of a word
    half = half.to(torch.int16).permute(0, 3, 2, 5, 4, 1, 6).contiguous()
    return half.view(torch.int32)


def _pack_mxfp8(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    # row 8r + g, column 64t + 32h + 8q + 4c + i
    return _pack_bytes(weight.view(-1, 2, 8, tiles, 2, 4, 2, 4)[..., [0, 2, 1, 3]])


def _pack_int8(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    # as MXFP8, but for the signs: two bytes have each other's
    some = weight.view(torch.int8).view(-1, 2, 8, tiles, 2, 4, 2, 4)
    signs = some[..., [2, 0, 3, 1]] & -128
    return _pack_bytes((some[..., [0, 2, 1, 3]].abs() | signs).view(torch.uint8))


def _pack_bytes(code: torch.Tensor) -> torch.Tensor:
    # block t h g q r c, then the bytes of a word
    return code.permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous().view(torch.int32)


def columns(weight: torch.Tensor) -> int:
    """Return K of a weight as ``pack`` takes it."""
    return weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)


def refused(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot take a weight, None if they can.

    Args:
        weight: see ``pack``.
        scale: see ``pack``.
        dtype: of the activations.

    """
    k = columns(weight)
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not bfloat16"
    if k % TILE_K != 0:
        return f"K = {k} is not a multiple of {TILE_K}"
    if not module.on_device(weight):
        return "the weight is not on the device"
    if weight.dtype == torch.int8:
        normal = (scale >= torch.finfo(torch.bfloat16).tiny) & (scale <= 2.0**63)
        if wrong := scale[~normal & (scale != 0)].tolist():
            return f"a scale is {wrong[0]:.3g}, not from 2**-126 to 2**63"
        return None
    if (largest := int(scale.view(torch.uint8).max())) > LARGEST_SCALE:
        return f"an E8M0 scale is {largest}, above {LARGEST_SCALE}"
    return None


def _launch(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill out [M, N] with products of x [M, K], a launch for 16 rows."""
    rows, k = x.shape
    n = out.shape[1]
    for first in range(0, rows, LAUNCH_ROWS):
        some = min(LAUNCH_ROWS, rows - first)
        most = 8 if some <= 8 else LAUNCH_ROWS
        operands = module.DenseOperands(
            x=module.pointer(x, first * k),
            weights=module.pointer(weight),
            scales=module.pointer(scale),
            bias=module.pointer(bias),
            residual=None,
            out=module.pointer(out, first * n),
            n=n,
            tiles=k // TILE_K,
            rows=some,
        )
        device = x.device.index
        shared = most * (k + 32) * 2
        if n > _WIDE_N and shared <= module.max_shared_memory(device):
            name, threads = f"dense_{kind}_wide_{most}", 640
            grid = (module.multiprocessors(device), 1)
        else:
            warps, shared = 12 if k <= 3072 else 16, 0
            name, threads = f"dense_{kind}_narrow_{warps}_{most}", 32 * warps
            grid = (-(-n // TILE_N), 1)
        module.launch(name, grid, threads, shared, operands, x.device)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] as [M, K], as the kernels read it: 16 bytes at once."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _decode_mx_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """Compute ``F.linear(x, W, bias)`` with a packed weight.

    Args:
        x: bfloat16 [..., K].
        weight: see ``pack``.
        scale: see ``pack``.
        bias: bfloat16 [N], or None.
        n: N.

    """
    eight = "int8" if scale.dtype == torch.bfloat16 else "mxfp8"
    kind = "mxfp4" if weight.dim() == 4 else eight
    out = x.new_empty(*x.shape[:-1], n)
    if x.numel() == 0:
        return out
    flat = rows_of(x)
    if flat.shape[0] <= MX_ROWS:
        _launch(kind, flat, weight, scale, bias, out.view(-1, n))
        return out
    k = flat.shape[1]
    scratch = x.new_empty(min(n, EXPANDED_N), k)
    for first in range(0, n, EXPANDED_N):
        last = min(first + EXPANDED_N, n)
        operands = module.ExpandOperands(
            weights=module.pointer(weight[first // TILE_N :]),
            scales=module.pointer(scale[first // TILE_N :]),
            out=module.pointer(scratch),
            n=last - first,
            tiles=k // TILE_K,
        )
        grid = (-(-(last - first) // TILE_N), 1)
        module.launch(f"expand_{kind}", grid, 256, 0, operands, x.device)
        part = F.linear(flat, scratch[: last - first], None if bias is None else bias[first:last])
        if last - first == n:
            return part.view(out.shape)
        out.view(-1, n)[:, first:last] = part
    return out


def _decode_mx_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


def bf16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``F.linear(x, weight, bias)`` with a weight as it is, at least one row."""
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    _launch("bf16", rows_of(x), weight, None, bias, out.view(-1, weight.shape[0]))
    return out


# Opaque to torch.compile: the number of rows is known when a graph is captured, not
# when it is traced.
ops.register("mx_linear", _decode_mx_linear, _decode_mx_linear_fake)


def mx_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """Call the operator, see ``_decode_mx_linear``."""
    return torch.ops.sparkforge.mx_linear(x, weight, scale, bias, n)
