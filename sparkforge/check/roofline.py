"""Speeds of decoding that follow from a memory's bandwidth and a step's bytes: docs/kernels.md.

No speed is a measurement or a promise. A *ceiling* is the maker's bandwidth / bytes: no engine can
be faster. What to *expect* has the bandwidth that others measured, and for each step the time that
is not memory's. A step reads the weights as the backend stores them (with padding, scales and
biases), keys and values of the context, norms, sinks and rows of the embedding. Not counted:
activations, new keys and values (under 1 MB a token), caches between steps. 1 GB is 10^9 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.pins.pins import Pins

GB = 10**9
_TARGET, _CONTEXT = "spark", 2048  # tokens
_CONTEXTS = (0, 2048, 8192, 32768, 102400)
_HEAD = ("GB/token", "experts", "qkv+o", "head", "KV", "rest", "sum", "ceiling", "expected", "")

MEASURED = 234 / 273
"""What others measured on GB10s, of the maker's figure (antirez/ds4)."""
STEP_S = 1.5e-3
"""Of a step, not memory's: on an H200, MXFP4 dense layers took 2.13 ms for bytes of 0.63
(docs/evidence/h200.md: 469 tokens/s; 4.46 TB/s)."""
RELEASE_STEP_S = 2.75e-3
"""The same of unpatched vLLM, from the same table."""

Format = Literal["bf16", "lossless", "q8_0", "mxfp8", "int8", "int6", "nvfp4", "mxfp4"]
Kind = Literal["qkv", "o", "lm_head"]
Moe = Literal["marlin-release", "marlin", "flashinfer_cutlass", "triton"]
_BF16 = 2
# MX formats have an E8M0 scale byte for 32 weights (OCP Microscaling Formats 1.0), the others two
# for 64 (INT8) or 32, one for 16 (NVFP4), or a list of what does not fit into 12 bits
WEIGHT_BYTES: Mapping[Format, float] = {
    "bf16": _BF16,
    "lossless": 12.03 / 8,
    "q8_0": 1 + 2 / 32,  # llama.cpp's
    "mxfp8": 1 + 1 / 32,
    "int8": 1 + 2 / 64,
    "int6": 0.75 + 2 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}

MOE_MULTIPLES: Mapping[Moe, tuple[int, int]] = {
    "marlin-release": (256, 128),
    "marlin": (64, 64),
    "flashinfer_cutlass": (128, 128),
    "triton": (1, 64),
}
"""Multiples that hidden and intermediate size are padded to, by MoE backend of vLLM 0.33.0.

Source: mxfp4_round_up_hidden_size_and_intermediate_size in fused_moe/oracle/mxfp4.py, checked by
tests/patches/test_marlin_moe_padding.py. ``marlin-release`` is Marlin in the release, ``marlin`` is
Marlin with our series. It pads the rows of w2 on, to 128, which the decode kernels do not read and
Marlin does (0.7 % more of gpt-oss's experts).
"""

LLAMA = "llama.cpp's file"


@dataclass(frozen=True)
class Shape:
    """A gpt-oss model, by ``config.json`` at the revision in pins.yaml: the one of 120b.

    A token uses ``top_k`` experts; half of the layers attend to the sliding window alone.
    """

    layers: int = 36
    experts: int = 128
    sliding_window: int = 128
    hidden: int = 2880
    intermediate: int = 2880
    top_k: int = 4
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 201088


def parse_layers(text: str) -> dict[Kind, Format]:
    """Read the value of ``--mxfp4-layers`` as our plugin of vLLM does: ``moe`` has no effect."""
    formats: dict[str, Format] = {one: one for one in get_args(Format)[3:]}
    formats |= {"": "mxfp4", "lossless": "lossless"}
    chosen: dict[str, Format] = {}
    for item in text.split(","):
        name, _, given = item.strip().partition("=")
        known = name in (*get_args(Kind), "moe") and name not in chosen
        if not known or given not in (("", "mxfp4") if name == "moe" else formats):
            msg = f"--layers {text}: {item.strip()!r} is unknown, or occurs twice"
            raise UsageError(msg, "for example qkv,o,lm_head=mxfp8")
        chosen[name] = formats[given]
    return {kind: chosen[kind] for kind in get_args(Kind) if kind in chosen}


def padded_experts(shape: Shape, moe: Moe) -> tuple[int, int]:
    """Return hidden and intermediate size as an MoE backend stores them."""
    hidden, inner = MOE_MULTIPLES[moe]
    return -(-shape.hidden // hidden) * hidden, -(-shape.intermediate // inner) * inner


def step_bytes(
    shape: Shape, moe: Moe, formats: Mapping[Kind, Format], context: int
) -> dict[str, float]:
    """Return the bytes that one user's token reads, by part; dense layers without a format: BF16.

    ``context``: tokens that it attends to, with itself.
    """

    def dense(rows: int, columns: int, kind: Kind) -> float:
        return rows * columns * WEIGHT_BYTES[formats.get(kind, "bf16")]

    hidden, layers = shape.hidden, shape.layers
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    wide, inner = padded_experts(shape, moe)
    expert = 3 * inner * wide * WEIGHT_BYTES["mxfp4"] + (2 * inner + wide) * _BF16
    tokens = layers // 2 * (context + min(context, shape.sliding_window))
    norms, sinks = (2 * layers + 1) * hidden, layers * shape.heads
    return {
        "experts": layers * shape.top_k * expert,
        "router": layers * (hidden + 1) * shape.experts * _BF16,
        "qkv": layers * (dense(qkv, hidden, "qkv") + qkv * _BF16),
        "o": layers * (dense(hidden, shape.heads * shape.head_dim, "o") + hidden * _BF16),
        "lm_head": dense(shape.vocab, hidden, "lm_head"),
        "kv": tokens * 2 * shape.kv_heads * shape.head_dim * _BF16,
        "other": (norms + sinks + hidden) * _BF16,  # and one row of the embedding
    }


def rows(pins: Pins, context: int = _CONTEXT) -> list[dict[str, Any]]:
    """Return the table: the release, the profiles, llama.cpp's file."""
    target = pins.target(_TARGET)
    bandwidth = (target.memory_gb_s or 0) * GB
    steps: list[tuple[str, Moe, Mapping[Kind, Format]]] = [("release", "marlin-release", {})]
    for name, choice in pins.choices.items():
        steps.append((name, "marlin", parse_layers(choice.mxfp4_layers or "moe")))
    # its router and biases are in FP32: 0.03 GB more, not counted
    steps.append((LLAMA, "triton", dict.fromkeys(get_args(Kind), "q8_0")))
    made: list[dict[str, Any]] = []
    for name, moe, formats in steps:
        step = step_bytes(Shape(), moe, formats, context)
        total, dense = sum(step.values()), step["qkv"] + step["o"]
        rest_s = RELEASE_STEP_S if moe == "marlin-release" else STEP_S
        ceiling, expected = bandwidth / total, 1 / (total / bandwidth / MEASURED + rest_s)
        gain = expected / made[0]["expected_tok_s"] if made else 1.0
        rest = step["router"] + step["other"]
        parts = (step["experts"], dense, step["lm_head"], step["kv"], rest, total)
        cells = (name, *(f"{part / GB:.3f}" for part in parts))
        cells = (*cells, f"{ceiling:.1f} tok/s", f"{expected:.1f} tok/s", f"x{gain:.2f}")
        made.append({"name": name, "expected_tok_s": expected, "cells": cells})
    return made


def markdown(pins: Pins) -> str:
    """Return the tables of docs/kernels.md: the bytes, and speeds by context."""
    bytes_ = pages.table(_HEAD, [row["cells"] for row in rows(pins)], range(1, len(_HEAD)))
    by_context = zip(*(rows(pins, context) for context in _CONTEXTS), strict=True)
    speeds = [
        (row[0]["name"], *(f"{at['expected_tok_s']:.1f}" for at in row)) for row in by_context
    ]
    head = ("expected tok/s, context of", *(f"{context:,}" for context in _CONTEXTS))
    return f"{bytes_}\n\n{pages.table(head, speeds, range(1, len(head)))}"
