"""Bytes that one decoding step reads: arithmetic on a model's shape.

It counts the bytes that each step has to read: weights as the backend stores them (with padding,
scales and biases), keys and values of the context, norms, sinks and rows of the embedding. It
ignores activations and new keys and values, which are well under 1 MB per token, caches between
steps, and all computation. ``build.py roofline`` and ``bench`` make ceilings from it.

1 GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

GB = 10**9
MX_BLOCK = 32
"""Weights that share one E8M0 scale byte (OCP Microscaling Formats 1.0)."""

Format = Literal["bf16", "mxfp8", "mxfp4"]
Kind = Literal["qkv", "o", "lm_head"]
KvCache = Literal["auto", "fp8"]
Moe = Literal["marlin-release", "marlin", "flashinfer_cutlass", "triton", "bf16_dequant"]

KINDS: tuple[Kind, ...] = get_args(Kind)
_BITS: Mapping[Format, int] = {"bf16": 16, "mxfp8": 8, "mxfp4": 4}
_KV_BYTES: Mapping[KvCache, int] = {"auto": 2, "fp8": 1}
BF16_BYTES = 2

MOE_MULTIPLES: Mapping[Moe, tuple[int, int]] = {
    "marlin-release": (256, 128),
    "marlin": (64, 64),
    "flashinfer_cutlass": (128, 128),
    "triton": (1, 64),
    "bf16_dequant": (1, 1),
}
"""Multiples that hidden and intermediate size are padded to, by MoE backend of vLLM 0.33.0.

Source: mxfp4_round_up_hidden_size_and_intermediate_size in fused_moe/oracle/mxfp4.py, checked by
tests/patches/test_marlin_moe_padding.py. ``marlin-release`` is Marlin in the release, ``marlin`` is
Marlin with our series. It pads the rows of w2 on, to 128, which the decode kernels do not read and
Marlin does (0.7 % more of gpt-oss's experts). ``bf16_dequant``, our plugin's,
expands the experts to BF16.
"""


@dataclass(frozen=True)
class Shape:
    """A gpt-oss model: decoder layers with attention, a router and experts, and a head."""

    layers: int
    """Decoder layers."""
    sliding_layers: int
    """Layers with attention to ``sliding_window`` tokens only."""
    sliding_window: int
    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width of one expert between gate/up and down."""
    experts: int
    top_k: int
    """``experts``, ``top_k``: experts of a layer, and of each token."""
    heads: int
    kv_heads: int
    head_dim: int
    """``heads``, ``kv_heads``, ``head_dim``: attention; every query head has one sink."""
    vocab: int
    """Rows of the embedding and of the separate head."""

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused q, k and v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def o_columns(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Setup:
    """Settings that a model's bytes depend on."""

    moe: Moe
    """Backend of the experts, which are in MXFP4 in the checkpoint."""
    layers: Mapping[Kind, Format] = field(default_factory=dict)
    """Format of each dense layer kind; others are BF16."""
    kv_cache: KvCache = "auto"
    """Format of keys and values; ``auto`` is BF16."""


@dataclass(frozen=True)
class Bytes:
    """Bytes that one decoding step reads, by kind."""

    experts: float
    router: float
    qkv: float
    o: float
    lm_head: float
    kv: float
    other: float
    """Norms, sinks, and one row of the embedding for each sequence."""

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the bytes by part, in the order of the fields."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


class LayersError(ValueError):
    """A list of layers is invalid; ``hint`` has an example."""

    hint = "for example qkv,o,lm_head=mxfp8"


def parse_layers(text: str) -> dict[Kind, Format]:
    """Read the value of ``--mxfp4-layers`` as our plugin of vLLM does.

    Args:
        text: comma-separated kinds, each optionally with its format: ``qkv,o,lm_head=mxfp8``.
            ``moe`` has no effect.

    Raises:
        LayersError: a kind or format is unknown, or a kind occurs twice.
    """
    chosen: dict[Kind, Format] = {}
    seen: set[str] = set()
    for item in text.split(","):
        name, _, given = item.strip().partition("=")
        if name not in (*KINDS, "moe"):
            msg = f"{text}: {name!r} is not a layer kind: use {', '.join(KINDS)} or moe"
            raise LayersError(msg)
        if name in seen:
            raise LayersError(f"{text}: {name} occurs twice")
        seen.add(name)
        wanted = given or "mxfp4"
        if wanted not in ("mxfp4", "mxfp8") or (name == "moe" and wanted != "mxfp4"):
            possible = "mxfp4" if name == "moe" else "mxfp4 or mxfp8"
            raise LayersError(f"{text}: {name} cannot be {wanted!r}: {possible}")
        for kind in KINDS:
            if kind == name:
                chosen[kind] = "mxfp8" if wanted == "mxfp8" else "mxfp4"
    return chosen


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def padded_experts(shape: Shape, moe: Moe) -> tuple[int, int]:
    """Return hidden and intermediate size as an MoE backend stores them."""
    hidden, intermediate = MOE_MULTIPLES[moe]
    return round_up(shape.hidden, hidden), round_up(shape.intermediate, intermediate)


def padded_dense(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a dense weight as Marlin stores it.

    Its tiles need rows by 64 and columns by 128, or vice versa; the smaller product is used (vLLM
    0.33.0, quantization/utils/marlin_utils.py, marlin_padded_nk).
    """
    candidates = (
        (round_up(rows, 64), round_up(columns, 128)),
        (round_up(rows, 128), round_up(columns, 64)),
    )
    return min(candidates, key=lambda shape: (shape[0] * shape[1], shape[0] + shape[1]))


def weight_bytes(rows: int, columns: int, form: Format) -> float:
    """Return the bytes of a weight: its elements, and in an MX format a scale byte for each 32."""
    if form == "bf16":
        return rows * columns * BF16_BYTES
    return rows * columns * _BITS[form] / 8 + rows * columns / MX_BLOCK


def expert_bytes(shape: Shape, moe: Moe) -> float:
    """Return the bytes of one expert of one layer: gate, up and down, and biases in BF16."""
    hidden, intermediate = padded_experts(shape, moe)
    form: Format = "bf16" if moe == "bf16_dequant" else "mxfp4"
    weights = weight_bytes(3 * intermediate, hidden, form)
    return weights + (2 * intermediate + hidden) * BF16_BYTES


def distinct_experts(experts: int, top_k: int, batch: int) -> float:
    """Return the average number of experts of a layer that a step of ``batch`` tokens reads.

    Each token chooses its ``top_k`` independently and evenly. Real routers have preferences, so a
    real step reads fewer.
    """
    return experts * (1 - (1 - top_k / experts) ** batch)


def _dense(rows: int, columns: int, form: Format) -> float:
    return weight_bytes(*((rows, columns) if form == "bf16" else padded_dense(rows, columns)), form)


def step_bytes(shape: Shape, setup: Setup, *, context: int, batch: int = 1) -> Bytes:
    """Return the bytes that one decoding step reads.

    Args:
        context: tokens that each sequence attends to, with its own.
        batch: sequences of the step; each gives one token.
    """
    form: Mapping[Kind, Format] = {"qkv": "bf16", "o": "bf16", "lm_head": "bf16", **setup.layers}
    hidden, layers = shape.hidden, shape.layers
    full = layers - shape.sliding_layers
    tokens = full * context + shape.sliding_layers * min(context, shape.sliding_window)
    token = 2 * shape.kv_heads * shape.head_dim * _KV_BYTES[setup.kv_cache]
    read = distinct_experts(shape.experts, shape.top_k, batch)
    return Bytes(
        experts=layers * read * expert_bytes(shape, setup.moe),
        router=layers * (hidden + 1) * shape.experts * BF16_BYTES,
        qkv=layers * (_dense(shape.qkv_rows, hidden, form["qkv"]) + shape.qkv_rows * BF16_BYTES),
        o=layers * (_dense(hidden, shape.o_columns, form["o"]) + hidden * BF16_BYTES),
        lm_head=_dense(shape.vocab, hidden, form["lm_head"]),
        kv=batch * tokens * token,
        other=((2 * layers + 1) * hidden + layers * shape.heads + batch * hidden) * BF16_BYTES,
    )
