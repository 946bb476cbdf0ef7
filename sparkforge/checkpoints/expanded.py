"""A gpt-oss checkpoint with its experts in BF16, which the unpatched release serves on any CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints import gptoss
from sparkforge.checkpoints.tensors import to_bf16
from sparkforge.checkpoints.tiny import write_checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"


def expand(source: Path, dest: Path) -> None:
    """Write the checkpoint of ``source`` to the new folder ``dest``, its MXFP4 weights in BF16.

    MXFP4's values are exact in BF16, except for scales beyond its exponents. Experts are stored as
    in the model's BF16 format: inputs before outputs.

    Raises:
        FileExistsError: ``dest`` exists.
        OSError: a file cannot be read or written.
    """
    tensors: dict[str, npt.NDArray[Any]] = {}
    found = gptoss.load(source).tensors
    for name, tensor in found.items():
        if name.endswith(_BLOCKS):
            plain = name.removesuffix(_BLOCKS)
            weights = gptoss.dequantize(tensor, found[plain + _SCALES])
            tensors[plain] = to_bf16(np.swapaxes(weights, 1, 2).astype(np.float32))
        elif not name.endswith(_SCALES):
            tensors[name] = to_bf16(tensor)
    files = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(source.glob("*.json"))
        if not path.name.endswith(".index.json")
    }
    files["config.json"].pop("quantization_config", None)
    write_checkpoint(dest, tensors, files)
