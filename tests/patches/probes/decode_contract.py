"""The decode kernels on the CPU: what a launch of each has to compute, from its operands alone.

``Launches`` stands in for
``vllm_sparkforge.decode.module.launch``. It reads the memory that operands point to, checks grid,
threads and shared memory, and computes in float64. The orders of the weights are written down here
a second time, from kernels/csrc: test_decode_kernels.py compares both with the CUDA sources.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tests.patches.probes import marlin_layout
from tests.patches.probes.marlin_layout import swiglu

MULTIPROCESSORS = 48
SHARED_MEMORY = 101_376  # of a block, on SM12x: the least of the devices that have the kernels
UNKNOWN = -2  # an expert that is yet to be chosen, by the logits
E2M1 = marlin_layout.E2M1

FORMATS = {
    "mxfp4": (4, 32, torch.uint8),
    "mxfp8": (8, 32, torch.uint8),
    "int8": (8, 64, torch.bfloat16),
    "int6": (6, 32, torch.bfloat16),
    "nvfp4": (4, 16, torch.float8_e4m3fn),
}
"""Bits of an element, elements under a scale, and its type."""

Product = Callable[[int, torch.Tensor], torch.Tensor]
"""Of an expert's weights with a row."""


def memory(address: int | None, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``count`` elements at an address, not a copy of them."""
    assert address, "a null pointer"
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def unpack(words: torch.Tensor, kind: str, n: int, k: int) -> torch.Tensor:
    """Read the tiles of dense.cuh: int32 words in a row to values, float64 [n, k]."""
    tiles = k // 64
    row, column = torch.arange(n)[:, None], torch.arange(k)[None, :]
    tile = row // 16 * tiles + column // 64
    g, r = row % 8, row % 16 // 8
    h, lane = column % 64 // 32, g * 4 + column % 32 // 8
    words = words.to(torch.int64) & 0xFFFFFFFF
    high = column % 2 * 16
    if kind.endswith("fp4"):
        half = words[(tile * 32 + lane) * 4 + 2 * h + r] >> high & 0xFFFF
        j = column % 8 // 2
        last = j == 3
        sign = half >> torch.where(last, 14, 15 - 3 * j) & 1
        exponent = half >> torch.where(last, 10, 7 - 3 * j) & 3
        mantissa = half >> torch.where(last, 13, 6 - 3 * j) & 1
        return E2M1[sign << 3 | exponent << 1 | mantissa]
    if kind == "int6":
        pair = r * 4 + column % 8 // 2
        first, third = tile * 192 + lane * 4 + 2 * h, tile * 192 + 128 + lane * 2 + h
        last = pair > 5
        at = torch.where(last, first + pair % 2, torch.where(pair > 3, third, first + pair // 2))
        word, turn = words[at], torch.where(last, 10, 6 * (pair % 2))
        half = (word << turn | word >> (32 - turn)) >> high
        rest = words[third] >> (2 * pair - 10).clamp(min=0) >> high
        magnitude = torch.where(last, half & 7 | rest & 24, half & 31)
        return (magnitude * (1 - 2 * (half >> 15 & 1))).to(torch.float64)
    word = words[((tile * 2 + h) * 32 + lane) * 4 + 2 * r + column % 8 // 4]
    byte = column % 2 * 2 + column % 4 // 2
    codes = word >> 8 * byte & 255
    if kind == "int8":  # the sign is the other byte's
        sign = word >> 8 * (byte ^ 1) + 7 & 1
        return ((codes & 127) * (1 - 2 * sign)).to(torch.float64)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)


def unpack_lossless(words: torch.Tensor, scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Read such tiles of dense.cuh, without the list, to values, float64 [n, k]."""
    row, column = torch.arange(n)[:, None], torch.arange(k)[None, :]
    r, h, c, i = row % 16 // 8, column % 64 // 32, column % 8 // 4, column % 4
    tile, lane = row // 16 * (k // 64) + column // 64, row % 8 * 4 + column % 32 // 8
    words = words.to(torch.int64) & 0xFFFFFFFF
    word = words[((tile * 3 + h) * 32 + lane) * 4 + 2 * r + c]
    exponents = words[((tile * 3 + 2) * 32 + lane) * 4 + 2 * h + r]
    at = i // 2 * 8 + i % 2 * 16
    mantissa, sign = word >> at & 127, word >> (at + 15) % 32 & 1
    # four bits, of which the left end of a word is followed by the right one
    code = (exponents | exponents << 32) >> (7 + at - 4 * c) % 32 & 15
    size = torch.where(code > 0, 128 + mantissa, mantissa).to(torch.float64)
    power = code.clamp(min=1) + scales[tile].to(torch.int64) - 15 - 127 - 7
    return size * torch.exp2(power.to(torch.float64)) * (1 - 2 * sign)


def unpack_scales(scales: torch.Tensor, block: int, n: int, k: int) -> torch.Tensor:
    """Read the scales of dense.cuh, E8M0 as uint8, to factors, float64 [n, k]."""
    row, group, each = torch.arange(n)[:, None], torch.arange(k // block)[None, :], 64 // block
    place, r = (row // 16 * (k // 64) + group // each) * 8 + row % 8, row % 16 // 8
    if block == 16:  # two pairs of lanes, halves of a tile, weights
        found = scales[((place * 2 + group % 2) * 2 + group % 4 // 2) * 2 + r]
    else:
        found = scales[(place * 2 + r) * each + group % each]
    factors = found.to(torch.float64)
    factors = torch.exp2(factors - 127) if found.dtype == torch.uint8 else factors
    return factors.repeat_interleave(block, 1)


def row_major_scale_at(n: int, k: int) -> torch.Tensor:
    """Return where the scale of each group of each column is, int64 [n, k // 32]."""
    column, group = torch.arange(n)[:, None], torch.arange(k // 32)[None, :]
    tile = column // 128 * (k // 128) + group // 4
    return tile * 512 + column % 32 * 16 + column % 128 // 32 * 4 + group % 4


def stored(values: torch.Tensor, form: torch.dtype, scale: Any) -> torch.Tensor:
    """Return BF16 keys or values as a cache of a type has them; E4M3 saturates, torch does not."""
    if form == torch.bfloat16:
        return values
    return (values.float() / scale).clamp(-448, 448).to(form)


class Launches:
    """Stands in for ``launch``.

    Attributes:
        names: of the kernels launched so far.
        spoil: what is done to each kernel's result, for example to make it wrong.
        choose: what is done to the experts that a router chose, int64 [rows, 4].
        move: what is done to the slots of the cache that rows have, int64 [rows].
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.spoil: Any = lambda result: result
        self.choose: Any = lambda ids: ids
        self.move: Any = lambda slots: slots

    def __call__(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        operands: Any,
        device: torch.device,
    ) -> None:
        """Compute what the kernel of this name does."""
        assert device.type == "cpu"
        self.names.append(name)
        family, _, rest = name.partition("_")
        {
            "add": self._add_norm,
            "dense": self._dense,
            "expand": self._expand,
            "experts": self._experts,
            "rotate": self._rotate,
            "route": self._route,
        }[family](rest.split("_"), grid, threads, shared, operands)

    def _dense(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        kind, form, most = words[0], words[1], int(words[-1])
        k = o.tiles * 64
        assert most in (8, 16)
        assert 0 < o.rows <= most
        assert o.x % 16 == 0
        if form == "narrow":
            assert int(words[2]) == (12 if k <= 3072 else 16)
            assert (grid, threads, shared) == ((-(-o.n // 16), 1), 32 * int(words[2]), 0)
        else:
            assert (grid, threads) == ((MULTIPROCESSORS, 1), 640)
            assert shared == most * (k + 32) * 2 <= SHARED_MEMORY
            assert o.n > 65536
        assert o.residual is None
        x = memory(o.x, o.rows * k, torch.bfloat16).view(o.rows, k).to(torch.float64)
        if kind == "bf16":
            assert o.scales is None
            weights = memory(o.weights, o.n * k, torch.bfloat16).view(o.n, k).to(torch.float64)
        else:
            weights = self._weights(kind, o)
        product = x @ weights.T
        if o.bias is not None:
            product += memory(o.bias, o.n, torch.bfloat16).to(torch.float64)
        out = memory(o.out, o.rows * o.n, torch.bfloat16).view(o.rows, o.n)
        out.copy_(self.spoil(product))

    def _weights(self, kind: str, o: Any) -> torch.Tensor:
        k, padded = o.tiles * 64, -(-o.n // 16) * 16
        if kind == "lossless":
            assert o.factor is None
            return self._lossless(o, padded, k)
        assert o.listed is None
        bits, block, form = FORMATS[kind]
        assert o.weights % 16 == o.scales % 8 == 0
        words = memory(o.weights, padded * k * bits // 32, torch.int32)
        scales = memory(o.scales, padded * k // block, form)
        factors = unpack_scales(scales, block, o.n, k)
        if kind == "nvfp4":
            factors *= memory(o.factor, 1, torch.float32).to(torch.float64)
        else:
            assert o.factor is None
        return unpack(words, kind, o.n, k) * factors

    def _lossless(self, o: Any, padded: int, k: int) -> torch.Tensor:
        words = memory(o.weights, padded * k * 3 // 8, torch.int32)
        scales = memory(o.scales, padded * k // 1024, torch.uint8)
        values = unpack_lossless(words, scales, o.n, k)
        begin = memory(o.listed, o.n + 1, torch.int32) + torch.arange(o.n + 1)
        entries = memory(o.listed, int(begin[-1]), torch.int32)[begin[0] :]
        place = torch.arange(o.n).repeat_interleave(begin.diff()), entries >> 16
        assert (values[place] == 0).all()
        values[place] = entries.to(torch.int16).view(torch.bfloat16).to(torch.float64)
        return values

    def _expand(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        assert (grid, threads, shared) == ((-(-o.n // 16), 1), 256, 0)
        out = memory(o.out, o.n * o.tiles * 64, torch.bfloat16).view(o.n, -1)
        out.copy_(self.spoil(self._weights(words[0], o)))

    def _add_norm(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        assert (grid[1], threads, shared) == (1, 512, 0)
        assert o.k <= 8 * 512
        self._normalized(self._added(grid[0], o), o)

    def _route(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        assert words == [""]
        assert 0 < o.rows <= 16
        assert (grid, threads) == ((o.n // 8, -(-o.rows // 4)), 512)
        assert shared == 4 * (o.k + 32) * 2
        assert o.n % 8 == 0
        assert 0 < o.n <= 128
        assert o.k % 64 == 0
        assert o.k <= 3072
        assert o.weights % 16 == 0
        normed = self._normalized(self._added(o.rows, o), o)
        weights = memory(o.weights, o.n * o.k, torch.bfloat16).view(o.n, o.k).to(torch.float64)
        product = normed @ weights.T + memory(o.bias, o.n, torch.bfloat16).to(torch.float64)
        memory(o.logits, o.rows * o.n, torch.bfloat16).view(o.rows, o.n).copy_(product)
        memory(o.ids, 4 * o.rows, torch.int32).fill_(UNKNOWN)

    def _choose(self, ids: torch.Tensor, shares: torch.Tensor, o: Any) -> None:
        """Write the experts of all rows, int32 [rows, 4], and their shares, float32 [rows, 4]."""
        assert (ids == UNKNOWN).all()
        assert o.logits % 8 == o.experts % 4 == 0
        assert 0 < o.experts <= 128
        logits = memory(o.logits, o.rows * o.experts, torch.bfloat16).view(o.rows, o.experts)
        # of equal logits the first is larger
        best = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[:, :4]
        shares.copy_(self.spoil(best.values[:, :4].softmax(-1)))
        if o.padding is not None:
            pads = memory(o.padding, o.rows, torch.bool)
            chosen = torch.where(pads[:, None], -1, chosen)
        ids.copy_(self.choose(chosen))

    def _rotate(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        fp8 = words == ["and", "cache", "fp8"]
        assert fp8 or words == ["and", "cache"]
        rows, values, size = grid[0], o.heads + o.kv_heads, 64
        heads = values + o.kv_heads
        assert (grid[1], threads, shared) == (-(-4 * heads // 128), 128, 0)
        assert o.qkv % 16 == o.cos_sin % 16 == o.queries % 16 == 0
        x = memory(o.qkv, rows * heads * size, torch.bfloat16).view(rows, heads, size)
        positions = memory(o.positions, rows, torch.int64)
        table = memory(o.cos_sin, (int(positions.max()) + 1) * size, torch.float32).view(-1, size)
        cosine, sine = table[positions].to(torch.float64)[:, None].chunk(2, -1)
        low, high = x.to(torch.float64).chunk(2, -1)
        turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)
        turned = self.spoil(turned).to(torch.bfloat16)
        queries = memory(o.queries, rows * o.heads * size, torch.bfloat16)
        queries.view(rows, o.heads, size).copy_(turned[:, : o.heads])
        assert o.written <= rows
        if not o.written:
            return
        form = torch.float8_e4m3fn if fp8 else torch.bfloat16
        scales = [memory(at, 1, torch.float32) if fp8 else 1 for at in (o.k_scale, o.v_scale)]
        assert o.cache % (8 * form.itemsize) == 0
        assert all(s % 8 == 0 for s in (o.block_stride, o.head_stride, o.slot_stride))
        for row, slot in enumerate(self.move(memory(o.slots, o.written, torch.int64)).tolist()):
            if slot < 0:
                continue
            block, place = divmod(slot, o.block_size)
            for head in range(o.kv_heads):
                at = block * o.block_stride + head * o.head_stride + place * o.slot_stride
                entry = memory(o.cache + form.itemsize * at, 2 * size, form)
                entry[:size] = stored(turned[row, o.heads + head], form, scales[0])
                entry[size:] = stored(x[row, values + head], form, scales[1])

    def _added(self, rows: int, o: Any) -> torch.Tensor:
        assert o.x % 16 == o.residual % 16 == o.norm % 16 == 0
        x, residual = (
            memory(at, rows * o.k, torch.bfloat16).view(rows, o.k).to(torch.float64)
            for at in (o.x, o.residual)
        )
        return x + residual

    def _normalized(self, total: torch.Tensor, o: Any) -> torch.Tensor:
        """Write a sum, and RMSNorm of what it is before it is rounded; return what was written."""
        norm = memory(o.norm, o.k, torch.bfloat16).to(torch.float64)
        assert o.epsilon > 0
        factor = (total.square().mean(-1, keepdim=True) + o.epsilon).rsqrt()
        normed = memory(o.normed, total.numel(), torch.bfloat16).view(total.shape)
        normed.copy_(self.spoil(total * factor * norm))
        memory(o.sum, total.numel(), torch.bfloat16).view(total.shape).copy_(self.spoil(total))
        return normed.to(torch.float64)

    def _experts(self, words: list[str], grid: Any, threads: int, shared: int, o: Any) -> None:
        if words == ["combine"]:
            rows = grid[0]
            assert (grid[1], threads, shared) == (1, 512, 0)
            assert o.k <= 8 * 512
            sums = memory(o.experts, 4 * rows * o.k, torch.float32).view(rows, 4, o.k)
            there = memory(o.ids, 4 * rows, torch.int32).view(rows, 4) >= 0
            out = memory(o.sum, rows * o.k, torch.bfloat16).view(rows, o.k)
            kept = torch.where(there[..., None], sums, torch.zeros_like(sums))
            total = kept.to(torch.float64).sum(1)
            if o.residual is None:
                assert (o.norm, o.normed) == (None, None)
                out.copy_(self.spoil(total))
            else:
                total += memory(o.residual, rows * o.k, torch.bfloat16).view(rows, o.k)
                self._normalized(total, o)
            return
        gate_up, most = "gate" in words[:2], int(words[-1])
        slots = 4 * o.rows
        given, weights = memory(o.ids, slots, torch.int32), memory(o.shares, slots, torch.float32)
        if gate_up and o.logits is not None:
            self._choose(given.view(-1, 4), weights.view(-1, 4), o)
        ids, shares = given.tolist(), weights.to(torch.float64)
        x = memory(o.x, (o.rows if gate_up else slots) * o.k, torch.bfloat16).view(-1, o.k)
        order = self._row_major if words[0] == "rows" else self._tiles
        product_of = order(gate_up, most, grid, threads, shared, o, max(*ids, 0) + 1)
        dtype, columns = (torch.bfloat16 if gate_up else torch.float32), o.n // (1 + gate_up)
        out = memory(o.out, slots * columns, dtype).view(slots, columns)
        for slot, expert in enumerate(ids):
            if expert < 0:  # what stands there stays, and may be anything
                out[slot] = torch.nan
                continue
            product = product_of(expert, x[slot // 4 if gate_up else slot].to(torch.float64))
            out[slot] = self.spoil(product if gate_up else product * shares[slot]).to(dtype)

    def _tiles(
        self, gate_up: bool, most: int, grid: Any, threads: int, shared: int, o: Any, experts: int
    ) -> Product:
        least = {1: 1, 2: 2, 8: 3, 16: 9}[most]
        assert least <= o.rows <= most
        assert o.n % 64 == o.k % 64 == 0
        tiles = 2 if gate_up and most > 2 else 1
        assert grid == (-(-(o.n // 64) // tiles), 4 * o.rows)
        assert (threads, shared) == (256, min(most, 8) * (o.k + 32) * 2)
        assert o.stride >= o.n
        assert o.pitch >= o.k
        assert o.stride % 64 == o.pitch % 32 == 0
        weights = memory(o.weights, experts * o.pitch * o.stride // 8, torch.int32)
        weights = weights.view(experts, o.pitch // 16, 2 * o.stride)
        scales = memory(o.scales, experts * o.pitch // 32 * o.stride, torch.uint8)
        scales = scales.view(experts, -1, o.stride)
        bias = memory(o.bias, experts * o.stride, torch.bfloat16).view(experts, o.stride)

        def product(expert: int, row: torch.Tensor) -> torch.Tensor:
            found = row @ marlin_layout.weight(weights[expert], scales[expert])[: o.k]
            found = (found + marlin_layout.bias(bias[expert]))[: o.n]
            return swiglu(found[::2], found[1::2]) if gate_up else found

        return product

    def _row_major(
        self, gate_up: bool, most: int, grid: Any, threads: int, shared: int, o: Any, experts: int
    ) -> Product:
        own = o.n // 2 if gate_up else o.n
        assert own % 32 == o.k % 32 == 0
        assert o.pitch % 128 == 0 <= o.pitch - o.k < 128
        assert o.stride == (2 if gate_up else 1) * -(-own // 128) * 128
        least = {1: 1, 8: 2, 16: 9}[most]
        assert least <= o.rows <= most
        # blocks of 32 or 64 columns, gate_up: and as many of the other half; one or two rows
        assert grid == (4 * o.rows, -(-own // 128) * (4 if most == 1 else 2))
        assert (threads, shared) == (256, min(most, 2) * (-(-o.k // 128) * 128 + 32) * 2)
        assert shared + 9 * 1024 <= SHARED_MEMORY
        assert o.x % 16 == o.weights % 16 == o.scales % 16 == o.bias % 16 == 0
        each, scales_each = o.stride * o.pitch // 2, o.stride * o.pitch // 32
        codes = memory(o.weights, experts * each, torch.uint8).view(experts, o.stride, -1)
        scales = memory(o.scales, experts * scales_each, torch.uint8).view(experts, -1)
        bias = memory(o.bias, experts * o.stride, torch.bfloat16).view(experts, -1)
        at = row_major_scale_at(o.stride, o.pitch)

        def product(expert: int, row: torch.Tensor) -> torch.Tensor:
            weight = marlin_layout.dense(codes[expert], scales[expert][at])
            found = weight[:, : o.k] @ row + bias[expert].to(torch.float64)
            half = o.stride // 2  # all of up before all of gate
            return swiglu(found[half : half + own], found[:own]) if gate_up else found[:own]

        return product
