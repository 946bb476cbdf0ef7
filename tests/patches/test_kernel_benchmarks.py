"""The kernel benchmarks, as far as a machine without a GPU can run them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkforge.checkpoints.tiny import TinyCheckpoint
from tests.patches.checkout import CHECKOUT as ROOT
from tests.patches.probing import run_module

TIMEOUT_S = 1800


def _run(python: Path, folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_routing_is_chosen_alike_for_both_kernels(patched_python: Path, tmp_path: Path) -> None:
    """Of benchmarks/decode.py: ids of three layers, in a step of 8 rows and in one of 5."""
    out = tmp_path / "out.json"
    run_module(patched_python, "probe_benchmarks", out, folder=tmp_path)
    answer: Any = json.loads(out.read_text(encoding="utf-8"))
    assert answer["names"] == [True] * 4
    router = [[0, 1, 2, 3]] * 7 + [[-1] * 4]
    assert answer["model"] == {"ids": [[router, router[:5]]] * 3, "distinct": [4, 4, None]}
    uniform = answer["uniform"]["ids"]
    for eight, five in uniform:
        assert five == eight[:5]
        assert all(len({*row}) == 4 and 0 <= min(row) <= max(row) < 128 for row in eight)
    assert len({str(layer) for layer in uniform}) == 3
    wanted = [
        sum(len({*itertools.chain(*step)}) for step in steps) / 3
        for steps in zip(*uniform, strict=True)
    ]
    assert answer["uniform"]["distinct"] == [*wanted, None]
    assert 20 < wanted[0] < 32  # of 32 choices: 28.5 on average


@pytest.mark.parametrize("weights", ["made up", "of a checkpoint"])
def test_accuracy_is_measured(
    patched_python: Path, tiny: TinyCheckpoint, tmp_path: Path, weights: str
) -> None:
    """Exit code 0 also says that no scale tried has less error than vLLM's for MXFP4."""
    out = tmp_path / "out.json"
    what: tuple[str | Path, ...] = ("--model", tiny.path)
    if weights == "made up":
        what = ("--rows", "64")
    said = _run(patched_python, tmp_path, ROOT / "benchmarks/mx_accuracy.py", *what, "--json", out)
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    kinds = {"qkv", "o", "lm_head"}
    if weights == "made up":
        assert {label.partition(",")[0] for label in results} == kinds
    else:
        layer = "model.layers.*.self_attn"
        assert {f"{layer}.qkv_proj.weight", f"{layer}.o_proj.weight", "lm_head.weight"} <= set(
            results
        )
    for label, errors in results.items():
        error = {name: found and found["weight"] for name, found in errors.items()}
        assert 0.01 < error["mxfp4"] <= error["mxfp4 largest"], label
        assert 0.001 < error["int8/32"] < min(error["mxint8"], error["int8/64"]), label
        # 128 elements do not divide a row of 2880.
        assert (error["int8/128"] is None) == label.startswith(("qkv", "lm_head,")), label
        assert f"| {label} | {error['mxfp4']:.4f} | {error['mxfp8']:.4f} |" in said
