"""The kernel benchmarks, as far as a machine without a GPU can run them."""

import json
import os
import subprocess
from pathlib import Path

from sparkforge.checkpoints.tiny import TinyCheckpoint
from tests.patches.checkout import CHECKOUT as ROOT


def test_accuracy_is_measured(patched_python: Path, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [patched_python, ROOT / "benchmarks/mx_accuracy.py", "--model", tiny.path, "--json", out],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    layer = "model.layers.*.self_attn"
    assert {f"{layer}.qkv_proj.weight", f"{layer}.o_proj.weight", "lm_head.weight"} <= set(results)
    for label, error in results.items():
        assert 0.001 < error["int8"] < error["mxfp8"] / 2 < error["mxfp4"] < 0.2, label
        shown = " | ".join(f"{error[form]:.4f}" for form in ("mxfp4", "mxfp8", "int8"))
        assert f"| {label} | {shown} |" in done.stdout
