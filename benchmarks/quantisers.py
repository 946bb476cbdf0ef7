"""Formats of weights as functions: a weight [N, K] to what its format makes of it, as BF16.

Those of the plugin are its own quantisers. Others, for comparison, are a set of values, a scale for
some elements along K, and a rule for that scale: it brings the largest element to the largest
value, or is searched, on a grid around that, for the least squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from vllm_sparkforge.mx.table import FORMATS

SLICE = 128 * 1024
"""Elements at once: intermediates stay in the CPU's cache, which is twenty times as fast."""
COLUMNS = 2880
"""Of gpt-oss-120b's qkv and head: what a scale for a row counts for."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# of llama.cpp's IQ4_NL; the sign of its scale is free
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Round = Callable[[torch.Tensor], torch.Tensor]


def integers(bits: int) -> tuple[float, Round]:
    """Sign and magnitude: as many values on both sides."""
    top = 2.0 ** (bits - 1) - 1
    return top, lambda x: x.round().clamp_(-top, top)


def values(found: tuple[float, ...], cells: int) -> tuple[float, Round]:
    """Nearest of some values, by a table of ``cells`` to one: no cell has a middle of two within.

    (``torch.bucketize`` is ten times as slow.)
    """
    top = max(map(abs, found))
    centres = (torch.arange(2 * int(top) * cells) + 0.5) / cells - int(top)
    table = torch.tensor(found)[(centres[:, None] - torch.tensor(found)).abs().argmin(-1)]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        places = ((x + int(top)) * cells).clamp_(0, len(table) - 1).to(torch.int32)
        return table.index_select(0, places.flatten()).view(x.shape)

    return top, rounded


def grid(lowest: float, highest: float, steps: int) -> tuple[float, ...]:
    """Factors around the scale of the largest element."""
    return tuple(torch.linspace(lowest, highest, steps).tolist())


FINE = grid(0.9, 1.02, 9)
COARSE = grid(0.6, 1.2, 16)


@dataclass(frozen=True)
class Blocks:
    """A format with a scale for a block of elements."""

    levels: tuple[float, Round]
    """the largest magnitude, and rounding to the format's values"""
    elem_bits: int
    block: int
    scale: str
    """the scale's type: bf16, fp16, e8m0 or e4m3 (with an FP32 factor for a row)"""
    factors: tuple[float, ...] = ()
    """of the largest element's scale, to try beside it"""
    signed: bool = False
    """the values are not symmetric: also try scales below zero"""

    @property
    def bits(self) -> float:
        """Bits of a weight, scales counted."""
        scale, row = {"bf16": (16, 0), "fp16": (16, 0), "e8m0": (8, 0), "e4m3": (8, 32)}[self.scale]
        return self.elem_bits + scale / self.block + row / COLUMNS

    def rounded(self, scale: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Scales as their type has them; ``row``, [N, 1, 1]: the largest of each row."""
        if self.scale == "bf16":
            return scale.bfloat16().float()
        if self.scale == "fp16":
            return scale.clamp(max=65504).half().float()
        if self.scale == "e8m0":
            return scale.clamp(min=2.0**-127).log2().ceil().exp2()
        unit = row / (self.levels[0] * 448)
        return (divided(scale, unit).clamp(max=448)).to(torch.float8_e4m3fn).float() * unit

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as this format has it."""
        parts = []
        for part in sliced(weight):
            x, row = part.unflatten(-1, (-1, self.block)), part.abs().amax(-1)[:, None, None]
            start = x.abs().amax(-1, keepdim=True) / self.levels[0]
            best, least = x, torch.full_like(start, torch.inf)
            for factor in (1.0, *self.factors):
                for sign in (1, -1) if self.signed else (1,):
                    scale = self.rounded(start * factor, row) * sign
                    found = self.levels[1](divided(x, scale)) * scale
                    error = (found - x).square().sum(-1, keepdim=True)
                    best = torch.where(error < least, found, best)
                    least = torch.minimum(error, least)
            parts.append(best.flatten(-2).bfloat16())
        return torch.cat(parts)


def divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale``, zero where the scale is: a block of zeros stays one."""
    return torch.where(scale == 0, 0.0, x / scale)


def sliced(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of a weight in float32, some at a time."""
    for part in weight.split(max(1, SLICE // weight.shape[1])):
        yield part.float()


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return what llama.cpp's Q8_0 makes of it: elements by the scale before it is rounded."""
    parts = []
    for part in sliced(weight):
        x = part.unflatten(-1, (-1, 32))
        scale = x.abs().amax(-1, keepdim=True) / 127
        scaled = divided(x, scale)
        codes = (scaled.abs() + 0.5).floor().copysign(scaled)  # C's roundf
        parts.append((codes * scale.half().float()).flatten(-2).bfloat16())
    return torch.cat(parts)


@dataclass(frozen=True)
class Format:
    """A format of the table: its bits, and its function."""

    bits: float
    quantise: Callable[[torch.Tensor], torch.Tensor]


def of_plugin(name: str, bits: float) -> Format:
    """Return a format of ``--mxfp4-layers``."""
    form = FORMATS[name]
    return Format(bits, lambda weight: form.dequantise(*form.quantise(weight.bfloat16())))


SEARCHED = ", searched"
"""In a name: with the scale of least squared error, not that of the largest element."""
FP4 = values((*(-one for one in E2M1[:0:-1]), *E2M1), 4)
BLOCKS = {
    "INT8, FP16 a 32": Blocks(integers(8), 8, 32, "fp16"),
    "INT8, BF16 a 64" + SEARCHED: Blocks(integers(8), 8, 64, "bf16", FINE),
    "INT8, E8M0 a 32": Blocks(integers(8), 8, 32, "e8m0"),
    "INT6, BF16 a 32" + SEARCHED: Blocks(integers(6), 6, 32, "bf16", FINE),
    "INT5, BF16 a 32": Blocks(integers(5), 5, 32, "bf16"),
    "FP4, E4M3 a 16": Blocks(FP4, 4, 16, "e4m3"),
    "FP4, E4M3 a 16" + SEARCHED: Blocks(FP4, 4, 16, "e4m3", COARSE),
    "NL4, E4M3 a 16" + SEARCHED: Blocks(values(IQ4_NL, 2), 4, 16, "e4m3", COARSE, signed=True),
}
TABLE = {
    "BF16": Format(16, lambda weight: weight.bfloat16()),
    "Q8_0": Format(8.5, q8_0),
    "MXFP8": of_plugin("mxfp8", 8.25),
    "INT8": of_plugin("int8", 8.25),
    "INT6": of_plugin("int6", 6.5),
    "NVFP4": of_plugin("nvfp4", 4.5),
    "MXFP4": of_plugin("mxfp4", 4.25),
    **{name: Format(blocks.bits, blocks) for name, blocks in BLOCKS.items()},
}
