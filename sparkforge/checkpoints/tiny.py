"""Tiny gpt-oss checkpoints in native MXFP4, made from a seed.

They have all parts of the real one that a serving stack can get wrong, and a tokenizer whose token
ids are bytes. The smallest has half a megabyte.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints.formats import (
    Random,
    byte_bpe,
    dequantize,
    read_tensors,
    to_bf16,
    write_checkpoint,
)
from sparkforge.serving.preflight import REFERENCE


@dataclass(frozen=True)
class Shape:
    """The architecture's numbers, in elements; each default is the smallest that tests its part."""

    layers: int = 4
    hidden: int = 128
    inter: int = 96
    experts: int = 8
    experts_per_token: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


# their numbers follow those of the bytes; the config in tiny.json names some
_NAMES = ("startoftext", "endoftext", "return", "call", "start", "channel", "message", "end")
VOCAB_SIZE = 256 + len(_NAMES)


def make_tiny_gpt_oss(dest: Path, *, seed: int = 0, shape: Shape = Shape()) -> None:
    """Write a tiny random gpt-oss checkpoint to the new folder `dest`: by the seed, everywhere."""
    tensors = _make_tensors(seed, shape)
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = byte_bpe({256 + n: f"<|{name}|>" for n, name in enumerate(_NAMES)}, ranks)
    files = {**json_files(shape, "tiny.json"), "tokenizer.json": tokenizer}
    write_checkpoint(dest, tensors, files)


# of the preflight's: heads of 64, eight query heads a KV head, sizes that Marlin takes as they are
_TRIAL = Shape(2, hidden=256, inter=256, experts=16, experts_per_token=4, heads=16, head_dim=64)


def make_trial(folder: Path) -> None:
    """Write the preflight's checkpoint, and its expected answers, to a new folder.

    ``trial.json`` has them as tests/unit/serving/test_preflight.py computes them: in float64, by
    definition of the model's parts, and rounded far above any difference between two machines.
    """
    make_tiny_gpt_oss(folder, seed=4, shape=_TRIAL)
    shutil.copyfile(Path(__file__).with_name("trial.json"), folder / REFERENCE)
    (folder / REFERENCE).chmod(0o644)


def expand(source: Path, dest: Path) -> None:
    """Write a checkpoint to the new folder `dest`, its MXFP4 weights in BF16, for any server."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    found = read_tensors(source)
    for name, tensor in found.items():
        plain, packed, _ = name.partition("_blocks")
        if packed:
            weights = dequantize(tensor, found[f"{plain}_scales"])
            # the model's BF16 format has inputs before outputs
            tensors[plain] = to_bf16(np.swapaxes(weights, 1, 2).astype(np.float32))
        elif not name.endswith("_scales"):
            tensors[name] = to_bf16(tensor)
    files = {path.name: json.loads(path.read_bytes()) for path in source.glob("*.json")}
    files["config.json"].pop("quantization_config")
    write_checkpoint(dest, tensors, files)


def _make_tensors(seed: int, shape: Shape) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors by their names in the checkpoint; BF16 as uint16 bits."""
    random, hidden, inter, experts = Random(seed), shape.hidden, shape.inter, shape.experts
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # the deviations below are for matrices with 128 inputs; more inputs divide them
    wide, mixed = math.sqrt(128 / hidden), math.sqrt(128 / queries)
    more = math.ceil(math.log2(inter / 128))
    tensors: dict[str, npt.NDArray[Any]] = {
        "model.embed_tokens.weight": random.bf16(VOCAB_SIZE, hidden, scale=1.0)
    }
    for layer in range(shape.layers):
        base = f"model.layers.{layer}"
        attn, mlp = f"{base}.self_attn", f"{base}.mlp"
        gate_up, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
        tensors |= {
            f"{base}.input_layernorm.weight": random.bf16(hidden, scale=0.15, mean=1.0),
            # attention prefers some keys, and rounding does not grow from layer to layer
            f"{attn}.q_proj.weight": random.bf16(queries, hidden, scale=0.084 * wide),
            f"{attn}.q_proj.bias": random.bf16(queries, scale=0.2),
            f"{attn}.k_proj.weight": random.bf16(keys, hidden, scale=0.084 * wide),
            f"{attn}.k_proj.bias": random.bf16(keys, scale=0.2),
            f"{attn}.v_proj.weight": random.bf16(keys, hidden, scale=0.12 * wide),
            f"{attn}.v_proj.bias": random.bf16(keys, scale=0.3),
            f"{attn}.o_proj.weight": random.bf16(hidden, queries, scale=0.06 * mixed),
            f"{attn}.o_proj.bias": random.bf16(hidden, scale=0.05),
            # High enough to take a large part of the softmax from the keys.
            f"{attn}.sinks": random.bf16(shape.heads, scale=1.0, mean=4.0),
            f"{base}.post_attention_layernorm.weight": random.bf16(hidden, scale=0.15, mean=1.0),
            # wide: with near ties between experts rounding would decide
            f"{mlp}.router.weight": random.bf16(experts, hidden, scale=0.3 * wide),
            f"{mlp}.router.bias": random.bf16(experts, scale=0.5),
            # Gate and up with a deviation of about four, so that some pass the limit of seven.
            **random.mxfp4(gate_up, experts, 2 * inter, hidden, low=-5, high=-2),
            f"{gate_up}_bias": random.bf16(experts, 2 * inter, scale=0.5),
            **random.mxfp4(down, experts, hidden, inter, low=-12 - more, high=-9 - more),
            f"{down}_bias": random.bf16(experts, hidden, scale=0.05),
        }
    tensors["model.norm.weight"] = random.bf16(hidden, scale=0.15, mean=1.0)
    tensors["lm_head.weight"] = random.bf16(VOCAB_SIZE, hidden, scale=0.35 * wide)
    return tensors


def json_files(shape: Shape, source: str) -> dict[str, Any]:
    """Return the small files of a checkpoint by name, but tokenizer.json; with our shape."""
    files: dict[str, Any] = json.loads(Path(__file__).with_name(source).read_bytes())
    kinds = ("sliding_attention", "full_attention")
    files["config.json"] |= {
        "experts_per_token": shape.experts_per_token,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "layer_types": [kinds[layer % 2] for layer in range(shape.layers)],
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
    }
    return files
