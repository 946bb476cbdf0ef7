"""A tiny gpt-oss checkpoint in native MXFP4, made from a seed.

It has all parts of the real one that a serving stack can get wrong (packed experts with
interleaved gate and up rows, attention sinks, alternating sliding windows, YaRN, grouped queries,
biases) in about half a megabyte, with a tokenizer whose token ids are bytes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from sparkforge.checkpoints.tensors import Random, write_safetensors
from sparkforge.checkpoints.tokenizer import byte_bpe, byte_characters

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

_SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
)
VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk, and the sizes that tests compare a server with."""

    path: Path
    """Folder with config.json, model.safetensors and the tokenizer."""
    num_layers: int
    """Transformer layers; each has experts."""
    num_experts: int
    """Experts in each layer."""
    packed_expert_bytes: int
    """Blocks and scales of all experts, biases left out."""
    bf16_expert_bytes: int
    """The same weights in BF16."""


def make_tiny_gpt_oss(dest: Path, *, seed: int = 0, shape: Shape = TINY) -> TinyCheckpoint:
    """Write a tiny random gpt-oss checkpoint to the new folder `dest`.

    The same seed gives the same bytes on every machine. The folder appears complete or not at
    all: it is written beside `dest` and renamed.

    Args:
        dest: Folder to create; its parents are created as needed.
        seed: Any integer from 0 to 2**32 - 1.

    Returns:
        The checkpoint, with its sizes in bytes.

    Raises:
        FileExistsError: `dest` exists.
        ValueError: `seed` is out of range.
        OSError: The folder cannot be written.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed}")
    tensors = _make_tensors(seed, shape)
    write_checkpoint(dest, tensors, json_files(shape))

    packed = sum(
        tensor.nbytes for name, tensor in tensors.items() if name.endswith(("_blocks", "_scales"))
    )
    weights = shape.layers * shape.experts * 3 * shape.hidden * shape.inter
    return TinyCheckpoint(
        path=dest,
        num_layers=shape.layers,
        num_experts=shape.experts,
        packed_expert_bytes=packed,
        bf16_expert_bytes=2 * weights,
    )


def write_checkpoint(
    dest: Path, tensors: Mapping[str, npt.NDArray[Any]], files: Mapping[str, Any]
) -> int:
    """Write a checkpoint to the new folder `dest`, which appears complete or not at all.

    Args:
        tensors: By name; uint16 stands for BF16.
        files: Contents of the small files, by name, as JSON values.

    Returns:
        The size of all files in bytes.

    Raises:
        FileExistsError: `dest` exists.
        OSError: The folder cannot be written.
    """
    if dest.exists():
        raise FileExistsError(f"{dest} exists; give a new folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        # mkdtemp creates a private folder, but a server in a container runs as another user.
        staging.chmod(0o755)
        write_safetensors(staging / "model.safetensors", tensors)
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (staging / name).write_text(text, encoding="utf-8")
        for file in staging.iterdir():
            file.chmod(0o644)  # a server runs as another user, regardless of our umask
            with file.open("rb") as written:  # a power failure must not leave an empty one
                os.fsync(written.fileno())
        total = sum(file.stat().st_size for file in staging.iterdir())
        staging.rename(dest)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return total


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
    eos = [special_ids["<|return|>"], special_ids["<|endoftext|>"], special_ids["<|call|>"]]
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "torch_dtype": "bfloat16",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": special_ids["<|return|>"],
        "pad_token_id": special_ids["<|endoftext|>"],
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
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
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
    tokenizer = byte_bpe(
        {token_id: token for token, token_id in special_ids.items()}, vocabulary, []
    )
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for message in messages %}"
            "<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
    }
    generation_config = {
        "bos_token_id": special_ids["<|startoftext|>"],
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": special_ids["<|endoftext|>"],
    }
    return {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
