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

# Nearest of E2M1's magnitudes, ties to the even code, in units of the scale: by hand.
E2M1_ROUNDED = {
    0.0: 0,
    0.25: 0,
    0.26: 1,
    0.75: 2,
    0.74: 1,
    1.25: 2,
    1.26: 3,
    1.75: 4,
    2.5: 4,
    2.6: 5,
    3.5: 6,
    3.4: 5,
    5.0: 6,
    5.1: 7,
    6.0: 7,
    7.9: 7,
}


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


@pytest.mark.parametrize(
    ("script", "kind", "lines"), [("h200_marlin_moe", "layer", 4), ("h200_dense", "product", 12)]
)
def test_dry_run_measures_and_tells(
    patched_python: Path, tmp_path: Path, script: str, kind: str, lines: int
) -> None:
    out = tmp_path / "out.jsonl"
    said = _run(
        *(patched_python, tmp_path, "-W", "error", ROOT / "benchmarks" / f"{script}.py"),
        *("--dry-run", "--batch", "1", "3", "--json", out),
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0]["kind"] == "machine"
    assert "no figures" in rows[0]["device"]
    measured = [row for row in rows if row["kind"] == kind]
    assert len(measured) == lines
    assert all(0 < row["distance"] < 0.004 for row in measured)
    assert sum(line.startswith("| ") for line in said.splitlines()) == lines + 2


def test_without_a_gpu_it_says_so(patched_python: Path, tmp_path: Path) -> None:
    for script in ("h200_marlin_moe", "h200_dense"):
        done = subprocess.run(
            [patched_python, ROOT / "benchmarks" / f"{script}.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 2
        assert "needs a CUDA GPU" in done.stderr


def test_they_call_vllm_rightly(patched_python: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_module(patched_python, "probe_benchmarks", out, folder=tmp_path)
    distances = json.loads(out.read_text(encoding="utf-8"))
    _routing_is_right(distances.pop("routing"))
    # The stand-in for the MXFP8 kernel multiplies nothing.
    assert distances.pop("dense mxfp8") > 0.1
    assert set(distances) == {"moe 256x128", "moe 128x64", "dense mxfp4"}
    assert all(0 < distance < 0.006 for distance in distances.values()), distances


def _routing_is_right(answer: Any) -> None:
    """Of benchmarks/decode.py: ids of three layers, in a step of 8 rows and in one of 5."""
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


def test_the_quantiser_rounds_to_the_nearest(patched_python: Path, tmp_path: Path) -> None:
    values = list(E2M1_ROUNDED)
    program = f"""
import sys, torch
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from gpu_common import expand, quantise
# The largest is 4 to 8 units of the scale: here 2**-3 is the unit.
row = torch.tensor({values} + [-v for v in {values}]) / 8
codes, scales = quantise("mxfp4", row[None])
nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten().tolist()
print(nibbles, scales.tolist(), expand("mxfp4", codes, scales)[0, -1].item())
ramp = torch.linspace(-3, 3, 32)
eight, scale = quantise("mxfp8", ramp[None])
print(scale.tolist(), (expand("mxfp8", eight, scale) - ramp).abs().max().item())
"""
    first, second = _run(patched_python, tmp_path, "-c", program).splitlines()
    rounded = list(E2M1_ROUNDED.values())
    # Minus zero does not count: it comes from 0 and from 0.25.
    negative = [code + 8 if value else 0 for value, code in E2M1_ROUNDED.items()]
    assert first == f"{rounded + negative} [[124]] -0.75"
    # 3 has exponent 1, E4M3's largest is 8: 2**-7. Near 3, E4M3 has steps of 0.25.
    scale, error = second.split(" ")
    assert scale == f"[[{127 - 7}]]"
    assert float(error) <= 0.125
