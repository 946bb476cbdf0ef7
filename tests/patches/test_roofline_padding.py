"""The padding that the roofline counts with is that of vLLM's own functions."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkforge import series
from sparkforge.roofline import Moe, padded_dense, padded_experts
from sparkforge.shapes import SHAPES
from tests.patches.checkout import CHECKOUT

PROBE = Path(__file__).with_name("probe_padding.py")
NARROW = "pad-marlin-s-moe-hidden-size-to-64-not-to-256.patch"

SHAPE = SHAPES["gpt-oss-120b"]
# the whole expert, and what two and four ranks have of it
WIDTHS = [2880, 1440, 720]
DENSE = [
    (SHAPE.qkv_rows, SHAPE.hidden), (SHAPE.hidden, SHAPE.o_columns), (SHAPE.vocab, SHAPE.hidden),
    (640, 2880), (2880, 512), (25136, 2880), (96, 96), (32, 4096), (4096, 32),
]  # fmt: skip
BACKENDS: Mapping[str, Moe] = {
    "FLASHINFER_CUTLASS_MXFP4_BF16": "flashinfer_cutlass",
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": "flashinfer_cutlass",
    "TRITON": "triton",
    "TRITON_UNFUSED": "triton",
}


def ask(python: Path, folder: Path, moes: Mapping[str, Moe]) -> Any:
    experts = [[backend, SHAPE.hidden, width] for backend in moes for width in WIDTHS]
    words = json.dumps({"experts": experts, "dense": DENSE})
    done = subprocess.run(
        [python, PROBE, words], env={**os.environ, "VLLM_CACHE_ROOT": str(folder)},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_padding_is_vllms(
    kind: str, stock_python: Path, patched_python: Path, tmp_path: Path
) -> None:
    names = {patch.name for patch in series.read(CHECKOUT / "patches" / "vllm").patches}
    narrow = kind == "patched" and NARROW in names
    moes: Mapping[str, Moe] = {**BACKENDS, "MARLIN": "marlin" if narrow else "marlin-release"}
    told = ask(patched_python if kind == "patched" else stock_python, tmp_path, moes)
    ours = [
        list(padded_experts(replace(SHAPE, intermediate=width), moe))
        for moe in moes.values()
        for width in WIDTHS
    ]
    assert told["experts"] == ours
    assert told["dense"] == [list(padded_dense(*shape)) for shape in DENSE]
