"""A tiny gpt-oss checkpoint in native MXFP4, made from a seed.

It has all parts of the real one that a serving stack can get wrong (packed experts with
interleaved gate and up rows, attention sinks, alternating sliding windows, YaRN, grouped queries,
biases) in about half a megabyte, with a tokenizer whose token ids are bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints import gptoss
from sparkforge.checkpoints.formats import (
    Random,
    byte_bpe,
    byte_characters,
    to_bf16,
    write_checkpoint,
)

SLIDING_WINDOW = 32
ORIGINAL_CONTEXT = 64
YARN_FACTOR = 8
MAX_CONTEXT = ORIGINAL_CONTEXT * YARN_FACTOR
"""In tokens; the window and YaRN's original context are shorter than a test prompt."""


@dataclass(frozen=True)
class Shape:
    """The architecture's numbers, in elements; layers alternate between window and full context.

    Each default is the smallest that still tests its part: three MXFP4 blocks in the intermediate
    size do not divide by two ranks, and every expert is used.
    """

    layers: int = 4
    hidden: int = 128
    inter: int = 96
    experts: int = 8
    experts_per_token: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


TINY = Shape()
MX_BLOCK = 32
"""Elements under one E8M0 scale."""

_ENDS = ("<|endoftext|>", "<|return|>", "<|call|>")
_SPECIAL_TOKENS = (
    *("<|startoftext|>", *_ENDS),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
)
VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk, and the sizes that tests compare a server with.

    Attributes:
        num_experts: in each of `num_layers` layers.
        packed_expert_bytes: blocks and scales of all experts, biases left out.
        bf16_expert_bytes: the same weights in BF16.
    """

    path: Path
    num_layers: int
    num_experts: int
    packed_expert_bytes: int
    bf16_expert_bytes: int


def make_tiny_gpt_oss(dest: Path, *, seed: int = 0, shape: Shape = TINY) -> TinyCheckpoint:
    """Write a tiny random gpt-oss checkpoint to the new folder `dest`.

    The same seed (0 to 2**32 - 1) gives the same bytes on every machine. The folder appears
    complete or not at all. FileExistsError: it exists.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed}")
    tensors = _make_tensors(seed, shape)
    write_checkpoint(dest, tensors, json_files(shape))
    packed = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    weights = shape.layers * shape.experts * 3 * shape.hidden * shape.inter
    return TinyCheckpoint(dest, shape.layers, shape.experts, packed, 2 * weights)


def expand(source: Path, dest: Path) -> None:
    """Write a checkpoint to the new folder `dest`, its MXFP4 weights in BF16, for any server.

    MXFP4's values are exact in BF16, except for scales beyond its exponents. Experts are stored as
    in the model's BF16 format: inputs before outputs. FileExistsError: `dest` exists.
    """
    tensors: dict[str, npt.NDArray[Any]] = {}
    found = gptoss.load(source).tensors
    for name, tensor in found.items():
        plain, packed, _ = name.partition("_blocks")
        if packed:
            weights = gptoss.dequantize(tensor, found[f"{plain}_scales"])
            tensors[plain] = to_bf16(np.swapaxes(weights, 1, 2).astype(np.float32))
        elif not name.endswith("_scales"):
            tensors[name] = to_bf16(tensor)
    files = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(source.glob("*.json"))
        if not path.name.endswith(".index.json")
    }
    files["config.json"].pop("quantization_config", None)
    write_checkpoint(dest, tensors, files)


def _make_tensors(seed: int, shape: Shape) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors by their names in the checkpoint; BF16 as uint16 bits."""
    random = Random(seed)
    hidden, inter, experts = shape.hidden, shape.inter, shape.experts
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # the deviations below are for matrices with 128 inputs; more inputs divide them
    wide, mixed = math.sqrt(128 / hidden), math.sqrt(128 / queries)
    down = math.ceil(math.log2(inter / 128))
    tensors: dict[str, npt.NDArray[Any]] = {
        "model.embed_tokens.weight": random.bf16(VOCAB_SIZE, hidden, scale=1.0)
    }
    for layer in range(shape.layers):
        base = f"model.layers.{layer}"
        attn = f"{base}.self_attn"
        mlp = f"{base}.mlp"
        tensors |= {
            f"{base}.input_layernorm.weight": random.bf16(hidden, scale=0.15, mean=1.0),
            # Wide enough that attention prefers some keys, and small enough beside the
            # embedding that rounding does not grow from layer to layer.
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
            # Wide router logits: with near ties between experts, rounding would decide any
            # comparison with a reference.
            f"{mlp}.router.weight": random.bf16(experts, hidden, scale=0.3 * wide),
            f"{mlp}.router.bias": random.bf16(experts, scale=0.5),
            # Gate and up with a deviation of about four, so that some pass the limit of seven.
            f"{mlp}.experts.gate_up_proj_blocks": random.codes(
                experts, 2 * inter, hidden // MX_BLOCK, MX_BLOCK // 2
            ),
            f"{mlp}.experts.gate_up_proj_scales": random.scales(
                experts, 2 * inter, hidden // MX_BLOCK, low=-5, high=-2
            ),
            f"{mlp}.experts.gate_up_proj_bias": random.bf16(experts, 2 * inter, scale=0.5),
            f"{mlp}.experts.down_proj_blocks": random.codes(
                experts, hidden, inter // MX_BLOCK, MX_BLOCK // 2
            ),
            f"{mlp}.experts.down_proj_scales": random.scales(
                experts, hidden, inter // MX_BLOCK, low=-12 - down, high=-9 - down
            ),
            f"{mlp}.experts.down_proj_bias": random.bf16(experts, hidden, scale=0.05),
        }
    tensors["model.norm.weight"] = random.bf16(hidden, scale=0.15, mean=1.0)
    tensors["lm_head.weight"] = random.bf16(VOCAB_SIZE, hidden, scale=0.35 * wide)
    return tensors


def json_files(shape: Shape = TINY) -> dict[str, Any]:
    """Return the small files of the checkpoint by name."""
    special_ids = {token: 256 + i for i, token in enumerate(_SPECIAL_TOKENS)}
    start, pad, end, call = (special_ids[token] for token in _SPECIAL_TOKENS[:4])
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": end,
        "pad_token_id": pad,
        "experts_per_token": shape.experts_per_token,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initial_context_length": ORIGINAL_CONTEXT,
        "initializer_range": 0.02,
        "intermediate_size": shape.inter,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)
        ],
        "max_position_embeddings": MAX_CONTEXT,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "factor": float(YARN_FACTOR),
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 1000.0,
        "sliding_window": SLIDING_WINDOW,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }
    vocabulary = {char: byte for byte, char in enumerate(byte_characters())}
    special = {token_id: token for token, token_id in special_ids.items()}
    template = (
        "{% for message in messages %}"
        "<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    return {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": start,
            "do_sample": True,
            "eos_token_id": [end, pad, call],
            "pad_token_id": pad,
        },
        "tokenizer.json": byte_bpe(special, vocabulary, []),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": MAX_CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    }
