# SPDX-License-Identifier: Apache-2.0
"""A weight-only product in plain torch, for CPUs.

It is a reference and a means to run a model that is meant for another platform, not a fast kernel:
every call expands the whole weight, a slice at a time, so that the weight stays in its format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_sparkforge import ops
from vllm_sparkforge.mx.table import FORMATS, rows

# Elements of a weight that are expanded at once: 32 MiB in BF16.
_SLICE_ELEMS = 16 * 1024 * 1024


def _mx_linear_cpu(
    x: torch.Tensor, form: str, tensors: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute ``F.linear(x, W, bias)``.

    Args:
        x: [..., K].
        form: a format's name.
        tensors: what its ``quantise`` gives, of W [N, K].
        bias: [N], or None.
    """
    n = tensors[0].shape[0]
    out = x.new_empty(*x.shape[:-1], n)
    step = max(1, _SLICE_ELEMS // x.shape[-1])
    for start in range(0, n, step):
        some = slice(start, start + step)
        expanded = FORMATS[form].dequantise(*rows(tensors, some)).to(x.dtype)
        out[..., some] = F.linear(x, expanded, None if bias is None else bias[some])
    return out


def _mx_linear_cpu_fake(
    x: torch.Tensor, form: str, tensors: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], tensors[0].shape[0])


# opaque to torch.compile, which would unroll the slices and trace the table into every layer
ops.register("mx_linear_cpu", _mx_linear_cpu, _mx_linear_cpu_fake, dispatch_key="CPU")


def mx_linear(
    x: torch.Tensor, form: str, tensors: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Call the operator, see ``_mx_linear_cpu``."""
    return torch.ops.sparkforge.mx_linear_cpu(x, form, tensors, bias)
