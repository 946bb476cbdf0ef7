# SPDX-License-Identifier: Apache-2.0
"""BF16 in 12 bits, bit for bit, as ``kernels/csrc/dense.cuh`` reads it.

Sign and mantissa are a byte. The exponent is four bits: how far it is above that of its tile, 16
rows by 64 columns, which is 15 below the largest finite one there, or zero. Code zero is of zeros;
where the tile's exponent is zero, of subnormals, too. What does not fit (far smaller elements, NaN,
infinity) is zero in its tile, and listed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_sparkforge.mx.tiles import TILE_K, TILE_N

LARGEST_K = 1 << 15
"""Columns that the list can name."""
LARGEST_SHARE = 1 / 128
"""Elements in the list, of all: a quarter of a bit each."""
_SLICE_ELEMS = 4 * 1024 * 1024
"""Elements that are encoded at once: the temporaries are some 40 bytes an element."""
_RAISED = 15  # a scale is the tile's exponent plus this: no zero, which is no normal number
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_BYTES = [0, 2, 1, 3]  # elements of four whose mantissas the bytes of a word have
_SIGNS = [3, 0, 2, 1]  # and those whose signs


def encode(weight: torch.Tensor) -> Packed:
    """Encode a bfloat16 weight [N, K], K a multiple of 64 up to ``LARGEST_K``.

    Returns:
        Elements, int32 [B, K // 64, 384], scales, uint8 [B, K // 64], and the list, int32
        [N + 1 + E]: place n of it has how far behind it the elements of row n begin, which are
        a column and the BF16, 16 bits each. B is N / 16, rounded up. Rows that fill the last tile
        are zero.
    """
    n, k = weight.shape
    tiles, blocks = k // TILE_K, -(-n // TILE_N)
    words = weight.new_empty((blocks, tiles, 3, 32, 4), dtype=torch.int32)
    scales = weight.new_empty((blocks, tiles), dtype=torch.uint8)
    rows, entries = [], []
    step = max(1, _SLICE_ELEMS // (TILE_N * k))
    for start in range(0, blocks, step):
        piece = weight[TILE_N * start : TILE_N * (start + step)]
        piece = F.pad(piece.view(torch.int16), (0, 0, 0, -len(piece) % TILE_N))
        bits = piece.view(-1, TILE_N, tiles, TILE_K).to(torch.int32) & 0xFFFF
        some = slice(start, start + len(bits))
        exponent = bits >> 7 & 0xFF
        largest = exponent.masked_fill(exponent == 0xFF, 0).amax(dim=(1, 3), keepdim=True)
        base = (largest - 15).clamp_(min=0)
        code = exponent.sub_(base)
        zero = bits & 0x7FFF == 0
        lost = ((code < (base > 0).to(torch.int32)) | (code > 15)) & ~zero
        code.masked_fill_(zero | lost, 0)
        words[some, :, :2] = _parts(bits.masked_fill(lost, 0))
        words[some, :, 2] = _exponents(code)
        scales[some] = (base + _RAISED).view(-1, tiles)
        block, row, tile, column = lost.nonzero().unbind(-1)
        rows.append((start + block) * TILE_N + row)
        entries.append((tile * TILE_K + column) << 16 | bits[block, row, tile, column])
    each = torch.bincount(torch.cat(rows), minlength=n)
    places = torch.arange(n + 1, 0, -1, device=weight.device)
    places[1:] += each.cumsum(0)
    listing = torch.cat([places, *entries]).to(torch.int32)
    return words.view(blocks, tiles, 384), scales, listing


def decode(packed: Packed) -> torch.Tensor:
    """Return the bfloat16 weight [N, K] that was encoded."""
    words, scales, listing = packed
    n, (blocks, tiles) = int(listing[0]) - 1, scales.shape
    parts = words.view(blocks, tiles, 3, 32, 4)
    # block t h g q r c, then the bytes of a word; to block r g t h q c i
    plain = parts[:, :, :2].contiguous().view(torch.uint8).view(-1, tiles, 2, 8, 4, 2, 2, 4)
    plain = plain.permute(0, 5, 3, 1, 2, 4, 6, 7).to(torch.int32)
    exponents = parts[:, :, 2]
    exponents = (exponents >> 3 & 0x1FFFFFFF | exponents << 29).contiguous().view(torch.uint8)
    # block t g q h r, then the bytes; to block r g t h q, nibble, byte
    both = exponents.view(-1, tiles, 8, 4, 2, 2, 4).permute(0, 5, 2, 1, 4, 3, 6).to(torch.int32)
    code = torch.stack((both >> 4, both & 15), -2)
    bits = (plain & 127 | code << 7)[..., _BYTES]  # the order is its own inverse
    bits |= (plain & 128)[..., [1, 3, 2, 0]] << 8
    bits = bits.reshape(blocks, TILE_N, tiles, TILE_K)
    base = scales.to(torch.int32).sub_(_RAISED).view(blocks, 1, tiles, 1)
    bits += (base << 7).masked_fill(bits & 0x7FFF == 0, 0)
    weight = bits.to(torch.int16).view(torch.bfloat16).view(-1, tiles * TILE_K)[:n].contiguous()
    begin = listing[: n + 1].long() + torch.arange(n + 1, device=listing.device)
    row = torch.repeat_interleave(torch.arange(n, device=listing.device), begin.diff())
    entries = listing[n + 1 :]
    weight.view(torch.int16)[row, (entries >> 16).long()] = entries.to(torch.int16)
    return weight


def num_listed(packed: Packed) -> int:
    """Return how many elements are listed."""
    return len(packed[2]) - int(packed[2][0])


def bits_each(packed: Packed) -> float:
    """Return the bits of an element, all counted."""
    return 8 * sum(one.nbytes for one in packed) / (packed[1].numel() * TILE_N * TILE_K)


def _parts(bits: torch.Tensor) -> torch.Tensor:
    """Signs and mantissas of BF16s, int32 [B, 16, T, 64], as words of two parts a tile."""
    # block r g t h q c i
    some = bits.view(-1, 2, 8, bits.shape[2], 2, 4, 2, 4)
    plain = (some & 127)[..., _BYTES] | (some >> 8 & 128)[..., _SIGNS]
    words = plain.to(torch.uint8).permute(0, 3, 4, 2, 5, 1, 6, 7).contiguous().view(torch.int32)
    return words.view(-1, bits.shape[2], 2, 32, 4)


def _exponents(code: torch.Tensor) -> torch.Tensor:
    """Exponents of 4 bits, int32 [B, 16, T, 64], as words of a part a tile."""
    some = code.view(-1, 2, 8, code.shape[2], 2, 4, 2, 4)[..., _BYTES]
    both = (some[..., 0, :] << 4 | some[..., 1, :]).to(torch.uint8)
    words = both.permute(0, 3, 2, 5, 4, 1, 6).contiguous().view(torch.int32)
    return (words << 3 | words >> 29 & 7).view(-1, code.shape[2], 32, 4)
