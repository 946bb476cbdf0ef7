"""Formats of weights as functions: a weight [N, K] to what its format makes of it, as BF16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm_sparkforge.mx.table import FORMATS

SLICE = 128 * 1024
"""Elements at once: intermediates stay in the CPU's cache, which is twenty times as fast."""


@dataclass(frozen=True)
class Format:
    """A format of the table: its bits, and its function."""

    bits: float
    quantise: Callable[[torch.Tensor], torch.Tensor]


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return what llama.cpp's Q8_0 makes of it: elements by the scale before it is rounded."""
    parts = []
    for part in weight.split(max(1, SLICE // weight.shape[1])):
        x = part.float().unflatten(-1, (-1, 32))
        scale = x.abs().amax(-1, keepdim=True) / 127
        scaled = torch.where(scale == 0, 0.0, x / scale)  # a block of zeros stays one
        codes = (scaled.abs() + 0.5).floor().copysign(scaled)  # C's roundf
        parts.append((codes * scale.half().float()).flatten(-2).bfloat16())
    return torch.cat(parts)


def of_plugin(name: str, bits: float) -> Format:
    """Return a format of ``--mxfp4-layers``."""
    form = FORMATS[name]
    return Format(bits, lambda weight: form.dequantise(*form.quantise(weight.bfloat16())))


TABLE = {
    "BF16": Format(16, lambda weight: weight.bfloat16()),
    "Q8_0": Format(8.5, q8_0),
    "MXFP8": of_plugin("mxfp8", 8.25),
    "INT8": of_plugin("int8", 8.25),
    "INT6": of_plugin("int6", 6.5),
    "NVFP4": of_plugin("nvfp4", 4.5),
    "MXFP4": of_plugin("mxfp4", 4.25),
}
