"""A reference of gpt-oss in numpy, written from the definitions of its parts.

It shares nothing with any serving engine, and computes in the precision of its tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints.tiny import Floats, Shape, dequantize, make_tiny_gpt_oss, read_tensors

_SWIGLU_ALPHA = 1.702  # of an expert's activation; the limit is in the configuration


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint in memory."""

    config: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]
    """By the names in the file; BF16 widened to float32, uint8 unchanged."""

    def replaced(
        self, *, config: Mapping[str, Any] = {}, tensors: Mapping[str, npt.NDArray[Any]] = {}
    ) -> Model:
        """Return the model with some entries changed, as a comparison has to notice."""
        return Model({**self.config, **config}, {**self.tensors, **tensors})


def load(folder: Path) -> Model:
    """Read the checkpoint in `folder`, whose tensors are BF16 or U8; OSError: a file is missing."""
    return Model(json.loads((folder / "config.json").read_bytes()), read_tensors(folder))


@dataclasses.dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk, and the sizes that a server is compared with."""

    path: Path
    num_layers: int
    num_experts: int
    packed_expert_bytes: int  # blocks and scales of all experts, biases left out
    bf16_expert_bytes: int  # the same weights in BF16


def make_tiny(dest: Path) -> TinyCheckpoint:
    """Write the tiny checkpoint to the new folder `dest`."""
    make_tiny_gpt_oss(dest)
    shape, tensors = Shape(), read_tensors(dest)
    packed = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    weights = shape.layers * shape.experts * 3 * shape.hidden * shape.inter
    return TinyCheckpoint(dest, shape.layers, shape.experts, packed, 2 * weights)


def logits(model: Model, tokens: Sequence[int]) -> Floats:
    """Return logits [len(tokens), vocab]: row i predicts the token after position i."""
    x: Floats = model.tensors["model.embed_tokens.weight"][np.asarray(tokens)]
    cos, sin = (table.astype(x.dtype) for table in _rotary(model.config, len(tokens)))
    for layer in range(model.config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        x = x + _attention(model, layer, _norm(model, f"{base}.input_layernorm", x), cos, sin)
        x = x + _experts(model, layer, _norm(model, f"{base}.post_attention_layernorm", x))
    return np.asarray(_norm(model, "model.norm", x) @ model.tensors["lm_head.weight"].T)


def greedy(model: Model, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Return the `count` likeliest next tokens in turn, each with its lead in logits."""
    sequence, leads = list(tokens), []
    for _ in range(count):
        row = logits(model, sequence)[-1]
        second, first = np.argsort(row)[-2:]
        sequence.append(int(first))
        leads.append(float(row[first] - row[second]))
    return sequence[len(tokens) :], leads


def _norm(model: Model, name: str, x: Floats) -> Floats:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    scale = 1 / np.sqrt(mean + float(model.config["rms_norm_eps"]))
    return np.asarray(x * scale * model.tensors[f"{name}.weight"])


def _linear(model: Model, name: str, x: Floats) -> Floats:
    return np.asarray(x @ model.tensors[f"{name}.weight"].T + model.tensors[f"{name}.bias"])


def _rotary(config: Mapping[str, Any], length: int) -> tuple[Floats, Floats]:
    """Return cosines and sines [length, head_dim / 2] of rotary embedding extended by YaRN.

    Frequencies that turn often within the original context stay, and those that turn seldom are
    slowed by the factor, with a ramp between. Both have the concentration, a score its square.
    """
    scaling = config["rope_scaling"]
    theta, dim = float(config["rope_theta"]), int(config["head_dim"])
    factor, context = float(scaling["factor"]), int(scaling["original_max_position_embeddings"])
    half = dim // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float64) / half)
    fast, slow = (
        half * math.log(context / (scaling[name] * 2 * math.pi)) / math.log(theta)
        for name in ("beta_fast", "beta_slow")
    )
    low, high = max(fast, 0), min(slow, dim - 1)
    slowed = np.clip((np.arange(half) - low) / (high - low), 0, 1)
    frequencies = frequencies * (1 - slowed) + frequencies / factor * slowed
    concentration = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles) * concentration, np.sin(angles) * concentration


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate x [length, heads, head_dim]; element i pairs with i + head_dim / 2."""
    first, second = np.split(x, 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * c - second * s, second * c + first * s), axis=-1)


def _attention(model: Model, layer: int, x: Floats, cos: Floats, sin: Floats) -> Floats:
    config, base = model.config, f"model.layers.{layer}.self_attn"
    length, dim = len(x), int(config["head_dim"])
    queries, keys, values = (
        _linear(model, f"{base}.{part}_proj", x).reshape(length, -1, dim) for part in "qkv"
    )
    queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
    # Consecutive query heads share a key head.
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(dim)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = distance >= 0
    if config["layer_types"][layer] == "sliding_attention":
        visible &= distance < config["sliding_window"]
    scores = np.where(visible, scores, -np.inf)
    # The sink is one more column of the softmax that attends to nothing.
    sinks = np.repeat(model.tensors[f"{base}.sinks"][:, None, None], length, axis=1)
    scores = np.concatenate((scores, sinks), axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True))[..., :-1]
    mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(length, -1)
    return _linear(model, f"{base}.o_proj", mixed.astype(x.dtype))


def _experts(model: Model, layer: int, x: Floats) -> Floats:
    config, tensors, base = model.config, model.tensors, f"model.layers.{layer}.mlp"
    limit = float(config["swiglu_limit"])
    names = (f"{base}.experts.gate_up_proj", f"{base}.experts.down_proj")
    gate_up, down = (dequantize(tensors[f"{n}_blocks"], tensors[f"{n}_scales"]) for n in names)
    gate_up_bias, down_bias = (tensors[f"{name}_bias"] for name in names)
    router = _linear(model, f"{base}.router", x)
    chosen = np.argsort(-router, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    # The softmax runs over the chosen experts alone.
    shares = np.take_along_axis(router, chosen, axis=-1)
    shares = np.exp(shares - shares.max(axis=-1, keepdims=True))
    shares = shares / shares.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        positions, places = np.nonzero(chosen == expert)
        hidden = x[positions] @ gate_up[expert].T + gate_up_bias[expert]
        gate = np.minimum(hidden[:, 0::2], limit)
        up = np.clip(hidden[:, 1::2], -limit, limit)
        activated = gate / (1 + np.exp(-_SWIGLU_ALPHA * gate)) * (up + 1)
        weights = shares[positions, places][:, None]
        out[positions] += weights * (activated @ down[expert].T + down_bias[expert])
    return out
