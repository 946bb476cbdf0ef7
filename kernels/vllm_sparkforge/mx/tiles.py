# SPDX-License-Identifier: Apache-2.0
"""The order in which the decode kernels read a weight (``kernels/csrc/dense.cuh``).

Elements lie in tiles of 16 rows x 64 columns, in int32 words; so do the scales of a tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

TILE_N, TILE_K = 16, 64
_PACKED_ELEMS = 8 * 1024 * 1024
"""Elements that are packed at once: the temporaries are some 32 bytes an element."""

Words = Callable[[torch.Tensor, int], torch.Tensor]
"""Elements of rows, 16 to a block, and the tiles of a row, to the words of all tiles."""


def pack(
    words_of: Words, bits: int, block: int, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a weight [N, K], K a multiple of 64, into tiles.

    Args:
        bits: of an element.
        block: elements along K under one scale.
        weight: elements as their quantiser gives them.
        scale: [N, K // block].

    Returns:
        Elements, int32 [B, K // 64, 32 * bits], and scales [B, K // 64, 8, 2, 64 // block], a byte
        each as uint8; B is N / 16, rounded up. Rows that fill the last tile are zero.
    """
    scale = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    weight = weight.view(torch.uint8)
    tiles, each = scale.shape[1] * block // TILE_K, TILE_K // block
    blocks = -(-weight.shape[0] // TILE_N)
    words = weight.new_empty((blocks, tiles, 32 * bits), dtype=torch.int32)
    scales = scale.new_empty((blocks, tiles, 8, 2, each))
    step = max(1, _PACKED_ELEMS // (TILE_N * TILE_K * tiles))
    for start in range(0, blocks, step):
        some = slice(start, min(start + step, blocks))
        rows = slice(TILE_N * some.start, TILE_N * some.stop)
        missing = TILE_N * (some.stop - some.start) - weight[rows].shape[0]
        padding = (0, 0, 0, missing)
        words[some] = words_of(F.pad(weight[rows], padding), tiles).view(words[some].shape)
        # row 8r + g, group 64 / block * t + h: block t g r h
        groups = F.pad(scale[rows], padding).view(-1, 2, 8, tiles, each)
        scales[some] = groups.permute(0, 3, 2, 1, 4)
    return words, scales


def pack_nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Put a weight into MXFP4's tiles; scales are uint8 [B, K // 64, 8, 2, 2, 2]."""
    words, scales = pack(mxfp4, 4, 16, weight, scale)
    # row 8r + g, group 2h + p: block t g p h r
    return words, scales.unflatten(-1, (2, 2)).permute(0, 1, 2, 5, 4, 3).contiguous(), factor


def mxfp4(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    """Two elements a byte, the even one in the low nibble."""
    # row 8r + g; a byte is column 64t + 32h + 8q + 2j and the next
    code = torch.stack([weight & 15, weight >> 4], -1).view(-1, 2, 8, tiles, 2, 4, 4, 2)
    half = torch.zeros_like(code[..., 0, :], dtype=torch.int32)
    for j in range(4):
        sign, exponent, mantissa = (14, 10, 13) if j == 3 else (15 - 3 * j, 7 - 3 * j, 6 - 3 * j)
        some = code[..., j, :].to(torch.int32)
        half |= (some >> 3) << sign
        half |= (some >> 1 & 3) << exponent
        half |= (some & 1) << mantissa
    # block t g q h r, then the two halves of a word
    half = half.to(torch.int16).permute(0, 3, 2, 5, 4, 1, 6).contiguous()
    return half.view(torch.int32)


def mxfp8(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    """An element a byte."""
    # row 8r + g, column 64t + 32h + 8q + 4c + i
    return _bytes(weight.view(-1, 2, 8, tiles, 2, 4, 2, 4)[..., [0, 2, 1, 3]])


def int8(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    """As MXFP8, but for the signs: two bytes have each other's."""
    some = weight.view(torch.int8).view(-1, 2, 8, tiles, 2, 4, 2, 4)
    signs = some[..., [2, 0, 3, 1]] & -128
    return _bytes((some[..., [0, 2, 1, 3]].abs() | signs).view(torch.uint8))


def int6(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    """An integer a byte; 4 words of a lane, then 2 (``Int6`` of dense.cuh)."""
    code = weight.view(torch.int8).to(torch.int64)
    half = code.abs() | (code < 0).to(torch.int64) << 15
    # row 8r + g, column 64t + 32h + 8q + 2j and the next: block t g q h, then r j
    both = half.view(-1, 2, 8, tiles, 2, 4, 4, 2)
    pair = (both[..., 0] | both[..., 1] << 16).permute(0, 3, 2, 5, 4, 1, 6).flatten(-2)
    words = pair[..., 0:6:2] | _turned(pair[..., 1:6:2], 26)
    words[..., :2] |= _turned(pair[..., 6:] & 0x80078007, 22)
    words[..., 2] |= (pair[..., 6] & 0x00180018) << 2 | (pair[..., 7] & 0x00180018) << 4
    parts = (words[..., :2].flatten(2), words[..., 2].flatten(2))
    low = torch.cat(parts, -1).view(torch.int32)[..., ::2]  # the others are zero
    return low.contiguous()


def _turned(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Rotate 32 bits to the left, in int64."""
    return (words << bits | words >> (32 - bits)) & 0xFFFFFFFF


def _bytes(code: torch.Tensor) -> torch.Tensor:
    # block t h g q r c, then the bytes of a word
    return code.permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous().view(torch.int32)
