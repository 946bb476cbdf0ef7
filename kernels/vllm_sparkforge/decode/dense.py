# SPDX-License-Identifier: Apache-2.0
"""Dense layers for few rows: quantized, lossless and BF16 weights, BF16 activations.

All but BF16 weights are packed once into tiles of 16 rows x 64 columns (``mx.tiles``); for many
rows they are expanded to BF16 in a scratch buffer. BF16 weights stay as they are. A row's result
depends neither on the rows beside it nor on their number, up to ``MX_ROWS`` of them
(``bf16.MAX_ROWS`` with BF16 weights) and above.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_sparkforge import ops
from vllm_sparkforge.decode import module
from vllm_sparkforge.mx.table import LOSSLESS, Format
from vllm_sparkforge.mx.tiles import TILE_K, TILE_N

LAUNCH_ROWS = 16
"""Rows of one launch."""
MX_ROWS = 64
"""Rows up to which quantized weights are not expanded. On a Spark bytes decide: to expand costs a
read of the weight, and its BF16 written and read, as much as 4.9 reads of 8 bits, 8.5 of 4; these
are four. (On an H200, which caches the BF16, qkv and o are faster expanded from 33 rows on.)"""
EXPANDED_N = 16384
"""Weight rows that are expanded at once."""
_WIDE_N = 65536
"""Weight rows above which each multiprocessor takes many of them."""


def refused(
    form: Format, tensors: Sequence[torch.Tensor], k: int, dtype: torch.dtype
) -> str | None:
    """Return why the kernels cannot take a weight, None if they can.

    Args:
        tensors: as ``form`` names them.
        k: columns.
        dtype: of the activations.

    """
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not bfloat16"
    if k % TILE_K != 0:
        return f"K = {k} is not a multiple of {TILE_K}"
    if not module.on_device(tensors[0]):
        return "the weight is not on the device"
    return form.wrong(*tensors)


def _launch(
    kind: str,
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill out [M, N] with products of x [M, K] and a packed weight, a launch for 16 rows."""
    rows, k = x.shape
    n = out.shape[1]
    names = ("weights", "scales", "listed" if kind == LOSSLESS.name else "factor")
    pointers = dict(zip(names, map(module.pointer, tensors), strict=False))
    for first in range(0, rows, LAUNCH_ROWS):
        some = min(LAUNCH_ROWS, rows - first)
        most = 8 if some <= 8 else LAUNCH_ROWS
        operands = module.DenseOperands(
            x=module.pointer(x, first * k),
            **pointers,
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
    form: str,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """Compute ``F.linear(x, W, bias)`` with a packed weight.

    Args:
        x: bfloat16 [..., K].
        form: its name.
        tensors: what its ``pack`` gives.
        bias: bfloat16 [N], or None.
        n: N.

    """
    out = x.new_empty(*x.shape[:-1], n)
    if x.numel() == 0:
        return out
    flat = rows_of(x)
    if flat.shape[0] <= MX_ROWS:
        _launch(form, flat, tensors, bias, out.view(-1, n))
        return out
    k, lossless = flat.shape[1], form == LOSSLESS.name
    scratch = x.new_empty(min(n, EXPANDED_N), k)
    weight, scale, *more = tensors
    for first in range(0, n, EXPANDED_N):
        last = min(first + EXPANDED_N, n)
        operands = module.ExpandOperands(
            weights=module.pointer(weight[first // TILE_N :]),
            scales=module.pointer(scale[first // TILE_N :]),
            out=module.pointer(scratch),
            n=last - first,
            tiles=k // TILE_K,
            factor=None if lossless or not more else module.pointer(*more),
            listed=module.pointer(*more, first) if lossless else None,
        )
        grid = (-(-(last - first) // TILE_N), 1)
        module.launch(f"expand_{form}", grid, 256, 0, operands, x.device)
        part = F.linear(flat, scratch[: last - first], None if bias is None else bias[first:last])
        if last - first == n:
            return part.view(out.shape)
        out.view(-1, n)[:, first:last] = part
    return out


def _decode_mx_linear_fake(
    x: torch.Tensor,
    form: str,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


def bf16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``F.linear(x, weight, bias)`` with a weight as it is, at least one row."""
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    _launch("bf16", rows_of(x), [weight], bias, out.view(-1, weight.shape[0]))
    return out


# Opaque to torch.compile: the number of rows is known when a graph is captured, not
# when it is traced.
ops.register("mx_linear", _decode_mx_linear, _decode_mx_linear_fake)


def mx_linear(
    x: torch.Tensor,
    form: str,
    tensors: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
) -> torch.Tensor:
    """Call the operator, see ``_decode_mx_linear``."""
    return torch.ops.sparkforge.mx_linear(x, form, tensors, bias, n)
