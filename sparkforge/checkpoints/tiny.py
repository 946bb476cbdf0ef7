"""Tiny gpt-oss checkpoints in native MXFP4, made from a seed, and the files of a checkpoint.

They have all parts of the real one that a serving stack can get wrong, and a tokenizer whose token
ids are bytes. The smallest has half a megabyte. All bytes are the same on every machine.
"""

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.serving.preflight import REFERENCE

Floats = npt.NDArray[np.floating[Any]]

# E2M1: sign, two bits of exponent with a bias of one, one bit of mantissa.
_E2M1 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


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


class Random:
    """Random weights from integers only, without numpy's float streams and the C library."""

    def __init__(self, seed: int) -> None:
        # The legacy generator's stream is frozen; the new one's may change between releases.
        self._state = np.random.RandomState(seed)

    def bf16(self, *shape: int, scale: float, mean: float = 0.0) -> npt.NDArray[np.uint16]:
        """Return BF16 bits, near normal, standard deviation about `scale`."""
        dice = self._state.randint(-64, 65, size=(4, *shape)).sum(axis=0)
        # A die of 129 faces has a standard deviation of 37.24, four have twice that.
        return to_bf16(np.float32(mean) + dice.astype(np.float32) * np.float32(scale / 74.48))

    def mxfp4(self, name: str, *shape: int, low: int, high: int) -> dict[str, npt.NDArray[Any]]:
        """Return blocks of 32 E2M1 codes, each as likely, and their scales of 2**low to 2**high."""
        *rows, columns = shape
        blocks = self._state.randint(0, 256, size=(*rows, columns // 32, 16)).astype(np.uint8)
        scales = self._state.randint(low, high + 1, size=(*rows, columns // 32)) + 127
        return {f"{name}_blocks": blocks, f"{name}_scales": scales.astype(np.uint8)}


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to the nearest BF16, ties to even; the bits as uint16, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write_checkpoint(
    dest: Path, tensors: Mapping[str, npt.NDArray[Any]], files: Mapping[str, Any]
) -> None:
    """Write tensors, uint16 for BF16, and small JSON files to the new folder `dest`."""
    dest.mkdir()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in sorted(tensors.items()):
        header[name] = {
            "dtype": {1: "U8", 2: "BF16"}[tensor.itemsize],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight
    with (dest / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(tensors.items()):
            file.write(tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes())
    for name, content in files.items():
        small = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (dest / name).write_text(small, encoding="utf-8")
    dest.chmod(0o755)  # a server in a container runs as another user, regardless of our umask
    for path in dest.iterdir():
        path.chmod(0o644)


def read_tensors(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Return a checkpoint's tensors by name: BF16 widened to float32, or uint8."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    del header["__metadata__"]
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        data = np.frombuffer(raw[start + low : start + high], np.uint8)
        if entry["dtype"] == "BF16":  # the upper half of a float32
            data = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        tensors[name] = data.reshape(entry["shape"])
    return tensors


def dequantize(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Floats:
    """Decode MXFP4: blocks [..., K/32, 16] and scales [..., K/32] to float32 [..., K].

    The low nibble comes first. Scale 255 is NaN.
    """
    codes = np.stack((blocks & 0x0F, blocks >> 4), axis=-1).reshape(*scales.shape, 32)
    factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    values = _E2M1[codes].astype(np.float64) * factors[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def byte_bpe(
    special: Mapping[int, str], ranks: Mapping[bytes, int], split: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return tokenizer.json of a byte-level BPE, for the tokenizers library.

    ``ranks`` ascend. A token's rank is also the place of its merges: all pairs of tokens that make
    it. Earlier merges decide which of them occurs. ``split`` divides a text before its bytes.
    """
    merges = []
    for token in ranks:
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += sorted((ranks[a], ranks[b], a, b) for a, b in pairs if {a, b} <= ranks.keys())
    # the printable character that stands for each byte
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = itertools.count(256)
    characters = [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    found: dict[str, Any] = json.loads(Path(__file__).with_name("tokenizer.json").read_bytes())
    if split:
        steps = [split, found["pre_tokenizer"]]
        found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": n, "content": t, **plain, "special": True} for n, t in special.items()]
    found["added_tokens"] = added
    found["model"]["vocab"] = {written(token): rank for token, rank in ranks.items()}
    found["model"]["merges"] = [f"{written(a)} {written(b)}" for *_, a, b in merges]
    return found
