"""The files of a checkpoint: random tensors, safetensors, tokenizer.json, everywhere the same."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]

# E2M1: sign, two bits of exponent with a bias of one, one bit of mantissa.
_E2M1 = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


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
