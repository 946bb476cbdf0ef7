# SPDX-License-Identifier: Apache-2.0
"""BF16 in 12 bits, bit for bit, in plain torch.

Sign and mantissa are a byte. The exponent is four bits: how far it is below the largest finite one
of its tile, 16 rows by 64 columns. The fifteenth code is the exponent zero, of zeros and
subnormals. What fits none of them (far smaller elements, NaN, infinity) is stored as a zero and
listed, so that a product may add the listed ones to that of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = (16, 64)
_ZERO = 15
_SLICE_ELEMS = 1024 * 1024  # as in formats.py


@dataclass(frozen=True)
class Lossless:
    """A weight [N, K]; N is a multiple of 16, K of 64."""

    parts: torch.Tensor
    """uint8 [N, K]: the sign, and seven bits of the mantissa"""
    codes: torch.Tensor
    """uint8 [N, K // 2]: how far below ``largest``, the even element in the low nibble"""
    largest: torch.Tensor
    """uint8 [N // 16, K // 64]: biased exponents"""
    places: torch.Tensor
    """int32 [E]: what is listed, as row * K + column, ascending"""
    listed: torch.Tensor
    """bfloat16 [E]"""

    @property
    def bits(self) -> float:
        """Bits of a weight, all counted."""
        tensors = (self.parts, self.codes, self.largest, self.places, self.listed)
        return 8 * sum(one.nbytes for one in tensors) / self.parts.numel()


def encode(weight: torch.Tensor) -> Lossless:
    """Encode a bfloat16 weight, some tiles' rows at a time.

    Whoever keeps the result looks at its ``bits``: a list has no limit here.
    """
    assert weight.dtype == torch.bfloat16
    height, width = TILE
    rows, columns = weight.shape
    assert rows % height == columns % width == 0 and weight.numel() < 2**31
    found: list[tuple[torch.Tensor, ...]] = []
    step = max(1, _SLICE_ELEMS // (columns * height)) * height
    for start in range(0, rows, step):
        piece = weight[start : start + step]
        bits = piece.contiguous().view(torch.int16).to(torch.int32)
        exponent = bits >> 7 & 0xFF
        tiles = exponent.masked_fill(exponent == 0xFF, 0).unflatten(1, (-1, width))
        largest = tiles.unflatten(0, (-1, height)).amax(dim=(1, 3))
        code = _expanded(largest) - exponent
        zero = exponent == 0
        listed = ((code < 0) | (code >= _ZERO)) & ~zero
        code.masked_fill_(zero | listed, _ZERO)
        sign = bits >> 8 & 0x80
        parts = torch.where(listed, sign, sign | bits & 0x7F).to(torch.uint8)
        places = listed.flatten().nonzero().flatten()
        found.append(
            (
                parts,
                (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8),
                largest.to(torch.uint8),
                (places + start * columns).to(torch.int32),
                piece.flatten()[places],
            )
        )
    return Lossless(*map(torch.cat, zip(*found, strict=True)))


def decode(packed: Lossless) -> torch.Tensor:
    """Return the bfloat16 weight [N, K] that was encoded."""
    code = torch.stack((packed.codes & 0xF, packed.codes >> 4), dim=-1).flatten(-2).to(torch.int32)
    exponent = _expanded(packed.largest.to(torch.int32)) - code
    exponent.masked_fill_(code == _ZERO, 0)
    parts = packed.parts.to(torch.int32)
    bits = (parts & 0x80) << 8 | exponent << 7 | parts & 0x7F
    weight = bits.to(torch.int16).view(torch.bfloat16)
    weight.view(-1)[packed.places.long()] = packed.listed
    return weight


def _expanded(largest: torch.Tensor) -> torch.Tensor:
    """Return a value of each tile for each of its elements."""
    return largest.repeat_interleave(TILE[0], dim=0).repeat_interleave(TILE[1], dim=1)
