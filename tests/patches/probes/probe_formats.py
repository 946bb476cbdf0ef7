"""Runs inside the interpreter under test: the functions of benchmarks/formats.py.

usage: python -m tests.patches.probes.probe_formats OUT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_sparkforge.mx import lossless

from benchmarks import trained


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def formats() -> dict[str, Any]:
    """Of each format: errors on normal weights of three sizes, and what zeros become."""
    normal = torch.randn(96, 576).mul_(0.02).bfloat16()
    zeros = torch.zeros(16, 64, dtype=torch.bfloat16)
    lone = zeros.clone()
    lone[3, 5] = -3.0
    found = {}
    for name, (_, quantise) in trained.TABLE.items():
        found[name] = {
            "errors": [error(quantise(normal * 2.0**k), normal * 2.0**k) for k in (0, -40, 40)],
            "zeros": bool((quantise(zeros) == 0).all()),
            "lone": error(quantise(lone), lone),
        }
    return found


def patterns() -> dict[str, Any]:
    """Every BF16 pattern in 12 bits: tiles of 1024 neighbours, shuffled ones, and exponents of a
    few sizes in a tile; in slices of two tiles, the last row of tiles not full."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    neighbours = bits.view(8, 8, 16, 64).transpose(1, 2).reshape(128, 512)
    found = {}
    kept, lossless._SLICE_ELEMS = lossless._SLICE_ELEMS, 2048
    for name, some in (
        ("neighbours", neighbours),
        ("shuffled", bits[torch.randperm(65536)].view(64, 1024)[:-3]),
        ("ranges", (torch.randn(75, 192) * 2.0 ** torch.randint(-140, 120, (75, 1))).bfloat16()),
        ("small", (torch.randn(75, 192) * 2.0**-126).bfloat16()),
    ):
        weight = some.contiguous().view(torch.bfloat16)
        packed = lossless.encode(weight)
        decoded = lossless.decode(packed)
        found[name] = {
            "equal": torch.equal(decoded.view(torch.int16), weight.view(torch.int16)),
            "listed": lossless.num_listed(packed),
            "bits": lossless.bits_each(packed),
        }
    lossless._SLICE_ELEMS = kept
    return found


def permuted() -> list[float]:
    """How far a model's logits move with its channels, and with the head's alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_()
    ids = torch.randint(0, 96, (12,))
    before = model(ids[None]).logits
    trained.permuted(model)
    moved = [error(model(ids[None]).logits, before)]
    head = model.lm_head.weight
    head.copy_(head.roll(1, 1))
    return [*moved, error(model(ids[None]).logits, before)]


if __name__ == "__main__":
    torch.manual_seed(0)
    answers = {
        "formats": formats(),
        "patterns": patterns(),
        "permuted": permuted(),
    }
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")
