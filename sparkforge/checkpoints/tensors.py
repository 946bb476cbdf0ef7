"""Random tensors, BF16, and safetensors files: the same bytes on every machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_SAFETENSORS_DTYPES = {np.dtype(np.uint8): "U8", np.dtype(np.uint16): "BF16"}


class Random:
    """Random weights from integers only: neither numpy's float streams nor the C library's
    logarithm can then change a byte of the checkpoint."""

    def __init__(self, seed: int) -> None:
        # The legacy generator's stream is frozen; the new one's may change between releases.
        self._state = np.random.RandomState(seed)

    def bf16(self, *shape: int, scale: float, mean: float = 0.0) -> npt.NDArray[np.uint16]:
        """Return BF16 bits, near normal, standard deviation about `scale`."""
        dice = self._state.randint(-64, 65, size=(4, *shape)).sum(axis=0)
        # A die of 129 faces has a standard deviation of 37.24, four have twice that.
        return to_bf16(np.float32(mean) + dice.astype(np.float32) * np.float32(scale / 74.48))

    def codes(self, *shape: int) -> npt.NDArray[np.uint8]:
        """Return packed E2M1 pairs, every code as likely as any other."""
        return self._state.randint(0, 256, size=shape).astype(np.uint8)

    def scales(self, *shape: int, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Return E8M0 scales of 2**low to 2**high."""
        return (self._state.randint(low, high + 1, size=shape) + 127).astype(np.uint8)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to the nearest BF16, ties to even; the bits as uint16, same shape."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write `tensors` in the safetensors format; uint16 stands for BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in sorted(tensors.items()):
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in sorted(tensors.items()):
            file.write(tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes())
