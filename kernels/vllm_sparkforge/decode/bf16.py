# SPDX-License-Identifier: Apache-2.0
"""Large BF16 layers: few rows with our kernels, more through torch.

Which one computes is decided inside the operator, so that what torch.compile makes of
a model depends on its configuration alone, not on the self-check.
"""

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config_or_none

from vllm_sparkforge import ops
from vllm_sparkforge.decode import dense, module, selfcheck

MAX_ROWS = dense.LAUNCH_ROWS
LEAST_ELEMS = 4 * 1024 * 1024
"""Elements from which on a weight goes through the kernels. Reading a smaller one takes
2 us or less, as long as a launch."""


def _decode_bf16_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``F.linear(x, weight, bias)``.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N], or None.

    """
    rows = x.shape[:-1].numel()
    if not 0 < rows <= MAX_ROWS or not selfcheck.passed("BF16", tuple(weight.shape)):
        return F.linear(x, weight, bias)
    return dense.bf16_linear(x, weight, bias)


def _decode_bf16_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


ops.register("bf16_linear", _decode_bf16_linear, _decode_bf16_linear_fake)


def prepare(layer: torch.nn.Module) -> None:
    """Have a layer's products go through the operator, if they can gain.

    Args:
        layer: with its loaded ``weight`` [N, K].

    """
    weight = layer.weight.data
    layer.uses_decode_kernels = False
    if (
        not module.on_device(weight)
        or weight.dtype != torch.bfloat16
        or not weight.is_contiguous()
        or weight.shape[-1] % dense.TILE_K != 0
        or weight.numel() < LEAST_ELEMS
        or weight.data_ptr() % 16 != 0
    ):
        return
    layer.uses_decode_kernels = True
    bias = getattr(layer, "bias", None)
    selfcheck.passes(
        "BF16",
        tuple(weight.shape),
        module.is_required(get_current_vllm_config_or_none()),
        lambda: selfcheck.compare_bf16(weight, bias),
    )
