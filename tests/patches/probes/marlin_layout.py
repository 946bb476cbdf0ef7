"""Marlin's memory layouts for MXFP4, and its GEMM for experts, on the CPU in float64.

Written from the kernels' source (vLLM 0.31.0, csrc/libtorch_stable: `gptq_marlin_repack.cu` for the
weights, `marlin_template.h` for the order in which scales and biases are read). Runs inside the
interpreter under test. `repack` and `moe_gemm` stand in for the two CUDA operators; `moe_gemm`
refuses what `moe_wna16_marlin_gemm` would refuse.
"""

import functools
from typing import Any

import torch

TILE_K, TILE_N = 16, 64
E2M1 = torch.tensor(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
)


def dense(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expand MXFP4 by its definition: uint8 [..., K/2] and E8M0 [..., K/32] to float64 [..., K]."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    factors = torch.exp2(scales.to(torch.float64) - 127)
    return E2M1[nibbles] * factors.repeat_interleave(32, -1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation: limit 7, alpha 1.702."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@functools.cache
def _tile() -> tuple[torch.Tensor, torch.Tensor]:
    """Return row (k) and column (n) of each nibble of a packed 16 x 64 tile: two [1024]."""
    rows, columns = [], []
    for word in range(TILE_K * TILE_N // 8):
        thread, warp = divmod(word, 4)
        for nibble in (0, 2, 4, 6, 1, 3, 5, 7):
            rows.append((thread % 4) * 2 + (0, 1, 8, 9)[nibble % 4])
            columns.append(warp * 16 + thread // 4 + 8 * (nibble // 4))
    return torch.tensor(rows), torch.tensor(columns)


def repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> torch.Tensor:
    """Do what `gptq_marlin_repack` does: int32 [K/8, N] to int32 [K/16, 2N]."""
    if num_bits != 4 or is_a_8bit:
        raise NotImplementedError("four bits with 16-bit activations only")
    if size_k % TILE_K or size_n % TILE_N:
        raise ValueError(f"{size_k} x {size_n} is not divisible by a tile of {TILE_K} x {TILE_N}")
    if b_q_weight.shape != (size_k // 8, size_n) or b_q_weight.dtype != torch.int32:
        raise ValueError(f"{b_q_weight.dtype} {tuple(b_q_weight.shape)} for {size_k} x {size_n}")
    shifts = torch.arange(8, dtype=torch.int64) * 4
    codes = (b_q_weight.to(torch.int64)[:, None, :] >> shifts[None, :, None]) & 15
    tiles = codes.reshape(size_k // TILE_K, TILE_K, size_n // TILE_N, TILE_N).transpose(1, 2)
    rows, columns = _tile()
    nibbles = tiles[:, :, rows, columns].reshape(size_k // TILE_K, -1, 8)
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def weight(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Read one expert as the kernel does: int32 [K/16, 2N], E8M0 [K/32, N] to float64 [K, N]."""
    size_k, size_n = packed.shape[0] * TILE_K, packed.shape[1] // 2
    shifts = torch.arange(8, dtype=torch.int64) * 4
    nibbles = (packed.to(torch.int64)[..., None] >> shifts) & 15
    nibbles = nibbles.reshape(size_k // TILE_K, size_n // TILE_N, TILE_K * TILE_N)
    rows, columns = _tile()
    tiles = torch.empty(*nibbles.shape[:2], TILE_K, TILE_N, dtype=torch.int64)
    tiles[:, :, rows, columns] = nibbles
    codes = tiles.transpose(1, 2).reshape(size_k, size_n)
    # In each 64 columns, a thread finds its eight, which lie eight apart, side by side; in each
    # four of them, the middle two are exchanged for the conversion of two at a time.
    column = torch.arange(64).reshape(8, 8).T.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    exponents = scales.view(torch.uint8).to(torch.float64).reshape(-1, 64) - 127
    ordered = torch.empty_like(exponents)
    ordered[:, column] = exponents
    ordered = ordered.reshape(size_k // 32, size_n).repeat_interleave(32, 0)
    return E2M1[codes] * torch.exp2(ordered)


def bias(permuted: torch.Tensor) -> torch.Tensor:
    """Read one expert's biases as the kernel does: [N] to float64 [N]."""
    column = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    ordered = torch.empty_like(permuted.reshape(-1, 32))
    ordered[:, column] = permuted.reshape(-1, 32)
    return ordered.reshape(-1).to(torch.float64)


def align(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `moe_align_block_size` does: sorted ids, expert of each block, their number."""
    flat, ids, experts = topk_ids.reshape(-1), [], []
    for expert in range(num_experts):
        rows = (flat == expert).nonzero().reshape(-1).tolist()
        rows += [flat.numel()] * (-len(rows) % block_size)
        ids += rows
        experts += [expert] * (len(rows) // block_size)
    return (
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(experts, dtype=torch.int32),
        torch.tensor([len(ids)], dtype=torch.int32),
    )


class MoeGemm:
    """Stands in for `moe_wna16_marlin_gemm`; notes the problem of each call.

    Attributes:
        calls: (block size, n, k) of each call.

    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def __call__(
        self,
        a: torch.Tensor,
        c: torch.Tensor,
        b_q_weight: torch.Tensor,
        b_bias: torch.Tensor | None,
        b_scales: torch.Tensor,
        a_scales: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        b_zeros: torch.Tensor | None,
        workspace: torch.Tensor,
        sorted_token_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        num_tokens_past_padded: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        moe_block_size: int,
        top_k: int,
        mul_topk_weights: bool,
        size_m: int,
        size_n: int,
        size_k: int,
        **_: Any,
    ) -> torch.Tensor:
        """Compute c = a times the chosen experts' weights, as the operator does."""
        checks = {
            "a": a.shape == (size_m, size_k),
            "c": c.shape == (size_m * top_k, size_n) and c.is_contiguous(),
            "b_q_weight": b_q_weight.shape[1:] == (size_k // 16, size_n * 2),
            "b_scales": b_scales.shape[1:] == (size_k // 32, size_n),
            "b_bias": b_bias is None or b_bias.shape[1] == size_n,
        }
        wrong = [name for name, right in checks.items() if not right]
        if wrong:
            raise ValueError(f"shapes of {wrong} for {size_m} x {size_n} x {size_k}")
        self.calls.append((moe_block_size, size_n, size_k))
        blocks = sorted_token_ids.reshape(-1, moe_block_size).tolist()
        for ids, expert in zip(blocks, expert_ids.tolist(), strict=True):
            rows = torch.tensor([row for row in ids if row < size_m * top_k])
            part = a[rows // top_k].to(torch.float64) @ weight(b_q_weight[expert], b_scales[expert])
            if b_bias is not None:
                part = part + bias(b_bias[expert])
            if mul_topk_weights:
                part = part * topk_weights.reshape(-1)[rows, None].to(torch.float64)
            c[rows] = part.to(c.dtype)
        return c
