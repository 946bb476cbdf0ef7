"""FlashInfer's own Python code, asked in a process whose path starts with one of its trees."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.patches.checkout import ROOT

QUESTIONS = "autotuner,architectures,mxfp8_moe"
TIMEOUT_S = 1800


def ask(python: Path, source: Path) -> dict[str, Any]:
    """Return a tree's answers (probes/probe_flashinfer.py) by question."""
    out = source.parent / f"{source.name}.json"
    env = {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        "FLASHINFER_WORKSPACE_BASE": str(source.parent / "workspace"),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
    }
    done = subprocess.run(
        [python, "-m", "tests.patches.probes.probe_flashinfer", QUESTIONS, out],
        env=env,
        cwd=source.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result
