# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts of gpt-oss for few rows, read where the MoE backend keeps them.

There is one copy of the weights, in the order of the backend that computes more rows:
Marlin's, or that of FlashInfer's CUTLASS MoE. A row's result does not depend on the
rows beside it. MoE layers run inside the operators ``moe_forward`` and
``moe_forward_shared``, so nothing here is traced by torch.compile.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.utils.math_utils import round_up

from vllm_sparkforge.decode import module
from vllm_sparkforge.decode.dense import rows_of
from vllm_sparkforge.mx.table import LARGEST_SCALE

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe import (
        FlashInferExperts,
    )
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

logger = init_logger(f"vllm.{__name__}")

MAX_ROWS = 16
TOP_K = 4
KIND = "MXFP4 experts"
ROW_MAJOR_KIND = "row-major MXFP4 experts"
PADDED = {KIND: (128, 64), ROW_MAJOR_KIND: (128, 128)}
"""Of what the hidden and the intermediate size are multiples, by order."""
_THREADS = 256
_MAX_HIDDEN = 4096  # columns of a block that sums or normalizes: 512 threads x 8
_ROW_MAJOR_TILE = 128  # columns, and k, whose scales lie together
_BLOCK_ROWS, _ROW_MAJOR_BLOCK_ROWS = 8, 2  # of an expert, that a block takes at most


class Weights(NamedTuple):
    """The experts of a layer.

    Attributes:
        w13: gate and up. Marlin's order: int32 [E, K // 16, 4 * I], interleaved.
            Row-major: uint8 [E, 2 * I, K // 2], all of up before all of gate.
        w13_scale: E8M0. Marlin's order: [E, K // 32, 2 * I]. Row-major:
            [E, 2 * I, K // 32], in tiles of 128 x 4 (``block_scale_interleave``).
        w13_bias: bfloat16 [E, 2 * I], in the order of the columns.
        w2: int32 [E, I // 16, 2 * L], L being K or what K is padded to, or
            uint8 [E, K, I // 2].
        w2_scale: [E, I // 32, L], or [E, K, I // 32] in tiles.
        w2_bias: bfloat16 [E, L].
        inner: the intermediate size that is not padding, of the row-major order;
            None is Marlin's.

    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_bias: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_bias: torch.Tensor
    inner: int | None = None

    @property
    def hidden(self) -> int:
        """K, with padding."""
        if self.inner is None:
            return self.w13.shape[1] * 16
        return self.w13.shape[2] * 2


class Logits(NamedTuple):
    """What the kernels choose experts by.

    Attributes:
        of: bfloat16 [M, E], the router's; E a multiple of 4 up to 128.
        padding: bool [M], whether a row only pads, or None.

    """

    of: torch.Tensor
    padding: torch.Tensor | None


def refused(moe: "FusedMoEConfig", input_dtype: torch.dtype | None) -> str | None:
    """Return why the kernels cannot take a layer's MXFP4 experts, None if they can.

    Args:
        moe: the layer.
        input_dtype: to which Marlin quantizes activations, None if it does not.

    """
    if input_dtype is not None:
        return f"activations are quantized to {input_dtype}"
    if moe.in_dtype != torch.bfloat16:
        return f"activations are {moe.in_dtype}, not bfloat16"
    if moe.activation != MoEActivation.SWIGLUOAI or not moe.has_bias:
        return "the experts are not gpt-oss's: SWIGLU-OAI with biases"
    if moe.experts_per_token != TOP_K:
        return f"a row has {moe.experts_per_token} experts, not {TOP_K}"
    if moe.is_lora_enabled:
        return "LoRA is enabled"
    parallel = moe.moe_parallel_config
    if parallel.use_ep or parallel.enable_eplb:
        return "experts are spread over devices"
    return None


def refused_weights(weights: Weights) -> str | None:
    """Return why the kernels cannot take a layer's weights, None if they can."""
    w13, w2, inner = weights.w13, weights.w2, weights.inner
    if not module.on_device(w13):
        return "the weights are not on the device"
    k = weights.hidden
    if inner is None:
        inner = w2.shape[1] * 16
        if k % 64 != 0 or inner % 64 != 0:
            return f"{k} x {inner} are not multiples of 64"
    else:
        padded = w2.shape[2] * 2
        if k % _ROW_MAJOR_TILE != 0 or padded % _ROW_MAJOR_TILE != 0:
            return f"{k} x {padded} are not multiples of {_ROW_MAJOR_TILE}"
        if inner % 32 != 0:
            return f"an intermediate size of {inner} is not a multiple of 32"
    if k > _MAX_HIDDEN:
        return f"a hidden size of {k} is above {_MAX_HIDDEN}"
    # a block has its sums beside the rows: 16 KiB with the most rows, and a little
    shared = _shared_memory(MAX_ROWS, max(k, inner), weights) + 17 * 1024
    if shared > module.max_shared_memory(w13.device.index):
        return f"rows of {max(k, inner)} exceed a block's shared memory"
    scales = (weights.w13_scale, weights.w2_scale)
    largest = max(int(s.view(torch.uint8).max()) for s in scales)
    if largest > LARGEST_SCALE:
        return f"an E8M0 scale is {largest}, above {LARGEST_SCALE}"
    return None


def _most_rows(rows: int, weights: Weights) -> int:
    """Return the rows of the smallest kernel that takes so many."""
    smaller = (1, 2, 8) if weights.inner is None else (1, 8)
    return next(most for most in (*smaller, MAX_ROWS) if rows <= most)


def _shared_memory(most: int, k: int, weights: Weights) -> int:
    """Return the bytes in which a block keeps its rows."""
    if weights.inner is None:
        return min(most, _BLOCK_ROWS) * (k + 32) * 2
    return min(most, _ROW_MAJOR_BLOCK_ROWS) * (round_up(k, _ROW_MAJOR_TILE) + 32) * 2


class _Launch(NamedTuple):
    kernel: str
    blocks: int
    n: int
    stride: int
    pitch: int


def _launches(weights: Weights, k: int, most: int) -> tuple[_Launch, _Launch]:
    """Return how both products are launched: gate and up, then down."""
    w13, w2, inner = weights.w13, weights.w2, weights.inner
    if inner is None:
        n, tiles = w13.shape[2] // 2, 2 if most > 2 else 1
        return (
            _Launch("experts_gate_up", -(-n // 64 // tiles), n, n, w13.shape[1] * 16),
            _Launch("experts_down", k // 64, k, w2.shape[2] // 2, w2.shape[1] * 16),
        )
    # 32 columns a block, and two or more rows take twice as many; four 32 in each 128
    columns = 32 if most == 1 else 64
    return (
        _Launch(
            "experts_rows_gate_up",
            round_up(inner, _ROW_MAJOR_TILE) // columns,
            2 * inner,
            w13.shape[1],
            w13.shape[2] * 2,
        ),
        _Launch(
            "experts_rows_down",
            round_up(k, _ROW_MAJOR_TILE) // columns,
            k,
            w2.shape[1],
            w2.shape[2] * 2,
        ),
    )


def products(
    x: torch.Tensor,
    weights: Weights,
    ids: torch.Tensor,
    shares: torch.Tensor,
    logits: Logits | None = None,
) -> torch.Tensor:
    """Compute gpt-oss's experts with their router weights, not yet summed up.

    Args:
        x: bfloat16 [M, K], as ``rows_of`` returns it; M from 1 to ``MAX_ROWS``. K may
            be without its padding.
        weights: of the layer.
        ids: int32 [M, 4]; -1 in rows that only pad.
        shares: float32 [M, 4].
        logits: where given, ids are what ``route`` has left there, and both are
            overwritten: each row gets the experts of its largest logits, the largest
            first, and the softmax of these.

    Returns:
        float32 [M * 4, K]; anything in the rows of those that only pad.

    """
    rows, k = x.shape
    most = _most_rows(rows, weights)
    inner = weights.inner if weights.inner is not None else weights.w2.shape[1] * 16
    hidden = x.new_empty(rows * TOP_K, inner)
    sums = x.new_empty(rows * TOP_K, k, dtype=torch.float32)
    gate_up, down = _launches(weights, k, most)
    # Nothing may be launched between the two: see kernels/csrc/row_major.cuh.
    both = (
        (gate_up, x, weights.w13, weights.w13_scale, weights.w13_bias, hidden),
        (down, hidden, weights.w2, weights.w2_scale, weights.w2_bias, sums),
    )
    for how, rows_in, matrix, scales, bias, out in both:
        size_k = rows_in.shape[1]
        operands = module.ExpertOperands(
            x=module.pointer(rows_in),
            weights=module.pointer(matrix),
            scales=module.pointer(scales),
            bias=module.pointer(bias),
            ids=module.pointer(ids),
            shares=module.pointer(shares),
            logits=module.pointer(logits.of if logits else None),
            padding=module.pointer(logits.padding if logits else None),
            out=module.pointer(out),
            k=size_k,
            n=how.n,
            stride=how.stride,
            rows=rows,
            pitch=how.pitch,
            experts=logits.of.shape[1] if logits else 0,
        )
        grid = (how.blocks, rows * TOP_K)
        if weights.inner is not None:  # a block has two rows: those that read again follow at once
            grid = grid[::-1]
        shared = _shared_memory(most, size_k, weights)
        module.launch(f"{how.kernel}_{most}", grid, _THREADS, shared, operands, x.device)
    return sums


def sum_up(total: torch.Tensor, sums: torch.Tensor, ids: torch.Tensor) -> None:
    """Sum up the experts of each row.

    Args:
        total: bfloat16 [M, K], overwritten; contiguous.
        sums: float32 [M * 4, K], what ``products`` returns.
        ids: int32 [M, 4]; -1 where a row of ``sums`` does not count.

    """
    operands = module.CombineOperands(
        experts=module.pointer(sums),
        ids=module.pointer(ids),
        sum=module.pointer(total),
        k=total.shape[1],
    )
    module.launch("experts_combine", (total.shape[0], 1), 512, 0, operands, total.device)


def experts(
    output: torch.Tensor,
    x: torch.Tensor,
    weights: Weights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Compute gpt-oss's experts with their router weights, summed up.

    Args:
        output: bfloat16 [M, K], overwritten; M at most ``MAX_ROWS``.
        x: bfloat16 [M, K].
        weights: of the layer.
        topk_ids: integers [M, 4]; -1 in rows that only pad, whose output is zero.
        topk_weights: [M, 4].

    """
    if x.shape[0] == 0:
        return
    ids = topk_ids.to(torch.int32).contiguous()
    shares = topk_weights.to(torch.float32).contiguous()
    total = output if output.is_contiguous() else torch.empty_like(x)
    sum_up(total, products(rows_of(x), weights, ids, shares), ids)
    if total is not output:
        output.copy_(total)


def prepare(marlin: "MarlinExperts", layer: torch.nn.Module) -> bool:
    """Return whether a layer's experts go through the kernels, up to ``MAX_ROWS``.

    Args:
        marlin: what computes them otherwise.
        layer: with its weights in Marlin's order.

    """
    from vllm_sparkforge.decode import expertcheck, selfcheck

    config = get_current_vllm_config_or_none()
    if not marlin.quant_config.use_mxfp4_w4a16 or not module.enabled(config, "experts"):
        return False
    reason = refused(marlin.moe_config, marlin.input_dtype)
    if reason is None:
        weights = marlin.decode_weights(layer.w13_weight.data, layer.w2_weight.data)
        reason = refused_weights(weights)
    if reason is not None:
        logger.info_once("Decode kernels are not used for %s: %s.", KIND, reason)
        return False
    last = getattr(layer, "decode_last_expert", None)
    return selfcheck.passes(
        KIND,
        (weights.w13.shape[0], weights.hidden, weights.w2.shape[1] * 16),
        module.is_required(config),
        lambda: expertcheck.compare_experts(weights, marlin.decode_reference, last),
    )


def prepare_row_major(cutlass: "FlashInferExperts", layer: torch.nn.Module) -> bool:
    """The same for the weights as FlashInfer's CUTLASS MoE has them.

    Its activations are MXFP8, and those of the kernels BF16. So the kernels are compared
    with torch on the same weights, and only roughly with CUTLASS.

    Args:
        cutlass: what computes them otherwise.
        layer: with its weights in CUTLASS's order.

    """
    from vllm_sparkforge.decode import expertcheck, selfcheck

    config = get_current_vllm_config_or_none()
    if not module.enabled(config, "experts"):
        return False
    reason = refused(cutlass.moe_config, None)
    if reason is None:
        weights = cutlass.decode_weights(layer.w13_weight.data, layer.w2_weight.data)
        reason = refused_weights(weights)
    if reason is not None:
        logger.info_once("Decode kernels are not used for %s: %s.", ROW_MAJOR_KIND, reason)
        return False
    last = getattr(layer, "decode_last_expert", None)
    return selfcheck.passes(
        ROW_MAJOR_KIND,
        (weights.w13.shape[0], weights.hidden, weights.w2.shape[2] * 2),
        module.is_required(config),
        lambda: expertcheck.compare_row_major(weights, cutlass.decode_reference, last),
    )
