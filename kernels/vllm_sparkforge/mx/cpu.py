# SPDX-License-Identifier: Apache-2.0
"""A weight-only product in plain torch, for CPUs.

It is a reference and a means to run a model that is meant for another platform, not a fast kernel:
every call expands the whole weight, a slice at a time, so that the weight stays in its format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_sparkforge import ops
from vllm_sparkforge.mx.formats import int8_dequantize, mxfp4_dequantize, mxfp8_dequantize

_DEQUANTIZE = {torch.uint8: mxfp4_dequantize, torch.int8: int8_dequantize}
# Elements of a weight that are expanded at once: 32 MiB in BF16.
_SLICE_ELEMS = 16 * 1024 * 1024


def _mx_linear_cpu(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``F.linear(x, dequantize(weight, scale), bias)``.

    Args:
        x: [..., K].
        weight: MXFP4 as uint8 [N, K // 2], the even element in the low nibble, MXFP8 as
            float8_e4m3fn [N, K] or INT8 as int8 [N, K].
        scale: uint8 (E8M0) [N, K // 32]; INT8: bfloat16 [N, K // 64].
        bias: [N], or None.
    """
    dequantize = _DEQUANTIZE.get(weight.dtype, mxfp8_dequantize)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    step = max(1, _SLICE_ELEMS // x.shape[-1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        expanded = dequantize(weight[rows], scale[rows]).to(x.dtype)
        out[..., rows] = F.linear(x, expanded, None if bias is None else bias[rows])
    return out


def _mx_linear_cpu_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# opaque to torch.compile, which would unroll the slices and trace the table into every layer
ops.register("mx_linear_cpu", _mx_linear_cpu, _mx_linear_cpu_fake, dispatch_key="CPU")


def mx_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Call the operator, see ``_mx_linear_cpu``."""
    return torch.ops.sparkforge.mx_linear_cpu(x, weight, scale, bias)
