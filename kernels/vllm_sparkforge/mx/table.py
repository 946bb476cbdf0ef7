# SPDX-License-Identifier: Apache-2.0
"""The formats of dense layers, an object each: all that differs from one to another in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_sparkforge.mx import formats, lossless, tiles

LARGEST_SCALE = 190
"""Largest E8M0 scale that the kernels' arithmetic takes: 2 ** 63, as of other scales."""


def _wrong_e8m0(_: torch.Tensor, scale: torch.Tensor) -> str | None:
    if (largest := int(scale.view(torch.uint8).max())) > LARGEST_SCALE:
        return f"an E8M0 scale is {largest}, above {LARGEST_SCALE}"
    return None


def _wrong_bf16(_: torch.Tensor, scale: torch.Tensor) -> str | None:
    normal = (scale >= torch.finfo(torch.bfloat16).tiny) & (scale <= 2.0**63)
    if wrong := scale[~normal & (scale != 0)].tolist():
        return f"a scale is {wrong[0]:.3g}, not from 2**-126 to 2**63"
    return None


def _wrong_factor(_: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> str | None:
    if float(factor) > 2.0**54:  # of scales up to 448
        return f"the factor is {float(factor):.3g}, above 2**54"
    return None


def _wrong_columns(weight: torch.Tensor) -> str | None:
    if weight.shape[1] > lossless.LARGEST_K:
        return f"K = {weight.shape[1]} is above {lossless.LARGEST_K}"
    return None


@dataclass(frozen=True)
class Format:
    """What a weight [N, K] becomes: a tensor for each of ``names``."""

    name: str
    """in options, and of kernels: dense_NAME_wide_8"""
    kernel: str
    """in names as vLLM's log has them: MarlinKERNELLinearKernel"""
    block: int
    """elements along K under one scale; K is a multiple"""
    quantise: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """of a finite weight"""
    dequantise: Callable[..., torch.Tensor]
    """of all rows or some, see ``rows``, to bfloat16"""
    pack: Callable[..., tuple[torch.Tensor, ...]]
    """to as many tensors, which the decode kernels read; K is a multiple of 64"""
    wrong: Callable[..., str | None]
    """why the decode kernels cannot take scales, None if they can"""
    names: tuple[str, ...] = ("weight", "weight_scale")

    @property
    def label(self) -> str:
        """The name in texts."""
        return self.name.upper()


def rows(tensors: Sequence[torch.Tensor], some: slice) -> list[torch.Tensor]:
    """Return these rows of a weight's tensors; a number is of all rows."""
    return [one[some] if one.dim() else one for one in tensors]


FORMATS = {
    one.name: one
    for one in (
        Format(
            name="mxfp4",
            kernel="MxFp4",
            block=formats.BLOCK,
            quantise=formats.mxfp4_quantize,
            dequantise=formats.mxfp4_dequantize,
            pack=partial(tiles.pack, tiles.mxfp4, 4, formats.BLOCK),
            wrong=_wrong_e8m0,
        ),
        Format(
            name="mxfp8",
            kernel="Mxfp8",
            block=formats.BLOCK,
            quantise=formats.mxfp8_quantize,
            dequantise=formats.mxfp8_dequantize,
            pack=partial(tiles.pack, tiles.mxfp8, 8, formats.BLOCK),
            wrong=_wrong_e8m0,
        ),
        Format(
            name="int8",
            kernel="Int8",
            block=formats.INT8_BLOCK,
            quantise=formats.int8_quantize,
            dequantise=formats.int8_dequantize,
            pack=partial(tiles.pack, tiles.int8, 8, formats.INT8_BLOCK),
            wrong=_wrong_bf16,
        ),
        Format(
            name="int6",
            kernel="Int6",
            block=formats.BLOCK,
            quantise=formats.int6_quantize,
            dequantise=formats.int8_dequantize,
            pack=partial(tiles.pack, tiles.int6, 6, formats.BLOCK),
            wrong=_wrong_bf16,
        ),
        Format(
            name="nvfp4",
            kernel="NvFp4",
            block=formats.NVFP4_BLOCK,
            quantise=formats.nvfp4_quantize,
            dequantise=formats.nvfp4_dequantize,
            pack=tiles.pack_nvfp4,
            wrong=_wrong_factor,
            names=("weight", "weight_scale", "weight_global_scale"),
        ),
    )
}
"""By name."""
LOSSLESS = Format(
    name="lossless",
    kernel="Lossless",
    block=tiles.TILE_K,
    quantise=lambda weight: (weight,),
    dequantise=lambda weight: weight,
    pack=lossless.encode,
    wrong=_wrong_columns,
    names=("weight", "weight_scale", "weight_listed"),
)
"""BF16 as it is, packed. It is none of those: a layer that cannot have it stays as it is."""
EVERY = {**FORMATS, LOSSLESS.name: LOSSLESS}
