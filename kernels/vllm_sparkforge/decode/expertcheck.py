# SPDX-License-Identifier: Apache-2.0
"""Compare the kernels of MXFP4 experts: part of ``selfcheck``."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vllm_sparkforge.decode import experts, selfcheck
from vllm_sparkforge.mx.formats import mxfp4_dequantize

MXFP8_TOLERANCE = 0.15
"""Largest difference from experts that round their activations to MXFP8, twice."""

_MADE_UP_EXPERTS = 8


def _made_up(weights: experts.Weights) -> experts.Weights:
    """Return random weights of a few experts."""
    few = [tensor[:_MADE_UP_EXPERTS] for tensor in weights[:6]]
    return experts.Weights(
        selfcheck.random_bytes(few[0], 0, 256),
        selfcheck.random_bytes(few[1], 117, 123),
        torch.randn_like(few[2]),
        selfcheck.random_bytes(few[3], 0, 256),
        selfcheck.random_bytes(few[4], 117, 123),
        torch.randn_like(few[5]),
        weights.inner,
    )


class Checkpoint(NamedTuple):
    """Experts as a checkpoint has them, rows of gate and up in turn: see ``Weights``."""

    w13: torch.Tensor
    """uint8 [E, 2 * I, K // 2], the even element in the low nibble"""
    w2: torch.Tensor
    w13_scale: torch.Tensor
    """E8M0 as uint8 [E, 2 * I, K // 32]"""
    w2_scale: torch.Tensor
    w13_bias: torch.Tensor
    """bfloat16 [E, 2 * I]"""
    w2_bias: torch.Tensor


def _routed(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return float32 [M, K]: the sum of what ``expert`` gives for its rows."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for one in ids.unique().tolist():
        row, slot = (ids == one).nonzero(as_tuple=True)
        out.index_add_(0, row, expert(one, x[row].float()) * shares[row, slot].unsqueeze(-1))
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute gpt-oss's activation."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def checkpoint_experts(
    x: torch.Tensor,
    made: Checkpoint,
    ids: torch.Tensor,
    shares: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> torch.Tensor:
    """Compute experts in float32 from a checkpoint's bytes.

    Args:
        x: [M, K], or without its padding.
        ids: [M, S], of ``made``; ``shares`` likewise.
        rounded: what becomes of the inputs of both products.

    """

    def expert(one: int, rows: torch.Tensor) -> torch.Tensor:
        w13 = mxfp4_dequantize(made.w13[one], made.w13_scale[one]).float()
        both = rounded(rows) @ w13[:, : rows.shape[1]].T + made.w13_bias[one].float()
        hidden = rounded(swiglu(both[:, 0::2], both[:, 1::2]))
        w2 = mxfp4_dequantize(made.w2[one], made.w2_scale[one]).float()
        return (hidden @ w2.T + made.w2_bias[one].float())[:, : rows.shape[1]]

    return _routed(x, ids, shares, expert)


def row_major_experts(
    x: torch.Tensor, weights: experts.Weights, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Compute experts in row-major order in float32, from expanded weights."""

    def expert(one: int, rows: torch.Tensor) -> torch.Tensor:
        w13 = _row_major_matrix(weights.w13[one], weights.w13_scale[one])
        up, gate = (rows @ w13.float().T + weights.w13_bias[one].float()).chunk(2, -1)
        hidden = swiglu(gate, up)
        hidden[:, weights.inner :] = 0
        w2 = _row_major_matrix(weights.w2[one], weights.w2_scale[one])
        return hidden @ w2.float().T + weights.w2_bias[one].float()

    return _routed(x, ids, shares, expert)


def _row_major_matrix(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Expand one expert's matrix, whose scales lie in tiles of 128 x 4."""
    n, groups = scale.shape
    tiles = scale.view(torch.uint8).view(n // 128, groups // 4, 32, 4, 4)
    return mxfp4_dequantize(weight, tiles.permute(0, 3, 2, 1, 4).reshape(n, groups))


def _draws(num_experts: int, device: torch.device) -> Iterable[torch.Tensor]:
    """Yield experts of rows, int32 [M, 4]: a few, and then every expert at least once."""
    for rows in selfcheck.ROWS:
        scores = torch.rand(rows, num_experts, device=device, dtype=torch.float32)
        # rows that share experts, as close ones do
        scores[1::2, : experts.TOP_K] += 1
        yield scores.topk(experts.TOP_K).indices.to(torch.int32)
    places = torch.arange(num_experts + -num_experts % experts.TOP_K, device=device)
    every = torch.randperm(num_experts, device=device)[places % num_experts]
    yield from every.to(torch.int32).view(-1, experts.TOP_K).split(experts.MAX_ROWS)


def compare_experts(
    weights: experts.Weights,
    reference: Callable[..., torch.Tensor],
    last: Checkpoint | None = None,
) -> float:
    """Return the largest difference between our experts and another computation.

    Args:
        weights: of the layer.
        reference: computes the same from x, weights, ids and shares.
        last: the last expert as the checkpoint has it: both others read what a backend has
            made of it, right or wrong.

    """
    if not (weights.w13.any() and weights.w2.any()):  # of a dummy checkpoint
        weights, last = _made_up(weights), None
    selfcheck.settle()
    device, k = weights.w13.device, weights.hidden
    num_experts = weights.w13.shape[0]

    def difference(ids: torch.Tensor, shares: torch.Tensor, wanted: Callable[..., Any]) -> float:
        rows = ids.shape[0]
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        theirs = wanted(x, weights, ids, shares)
        pads = rows == 5  # one more that only pads
        padded = F.pad(x, (0, 0, 0, pads), value=1.0)
        ids = F.pad(ids, (0, 0, 0, pads), value=-1)
        ours = torch.full_like(padded, math.nan)
        shares = F.pad(shares, (0, 0, 0, pads), value=1.0)
        found = []
        for run in selfcheck.RUNS:
            run(partial(experts.experts, ours, padded, weights, ids, shares))
            if ours[rows:].any():
                raise ValueError("a row that pads is not zero")
            found.append(selfcheck.distance(ours[:rows], theirs))
            ours.fill_(math.nan)
        return selfcheck.worst(found)

    found = []
    for ids in _draws(num_experts, device):
        # the default type is BF16 while a model loads
        shares = torch.rand(ids.shape, device=device, dtype=torch.float32).softmax(-1)
        found.append(difference(ids, shares, reference))
    if last is not None:
        ids = torch.arange(num_experts - 1, num_experts - 1 - experts.TOP_K, -1, device=device)
        ids = ids.to(torch.int32).expand(experts.MAX_ROWS, -1).contiguous()
        shares = torch.zeros(ids.shape, device=device, dtype=torch.float32)
        shares[:, 0] = 1
        one, whole = torch.zeros_like(ids[:, :1]), shares[:, :1]
        found.append(difference(ids, shares, lambda x, *_: checkpoint_experts(x, last, one, whole)))
    return selfcheck.worst(found)


def compare_row_major(
    weights: experts.Weights,
    cutlass: Callable[..., torch.Tensor],
    last: Checkpoint | None = None,
) -> float:
    """Return the largest difference between our experts in row-major order and torch.

    Args:
        weights: of the layer.
        cutlass: computes the same from x, weights, ids and shares, with activations
            in MXFP8; only of these weights.
        last: see ``compare_experts``.

    Raises:
        ValueError: CUTLASS, which gets rows beyond ``MAX_ROWS``, reads other weights.

    """

    def reference(
        x: torch.Tensor,
        used: experts.Weights,
        ids: torch.Tensor,
        shares: torch.Tensor,
    ) -> torch.Tensor:
        wanted = row_major_experts(x, used, ids, shares)
        if used is weights:  # they are no made-up ones
            difference = selfcheck.distance(cutlass(x, used, ids, shares), wanted)
            if not difference <= MXFP8_TOLERANCE:
                raise ValueError(
                    f"FlashInfer's CUTLASS MoE differs by {difference:.2g} from torch, "
                    f"more than {MXFP8_TOLERANCE}"
                )
        return wanted

    return compare_experts(weights, reference, last)
