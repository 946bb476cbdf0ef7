"""FlashInfer's own Python code, asked in a process whose path starts with one of its trees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.patches.checkout import ROOT
from tests.patches.probing import run_module

QUESTIONS = "autotuner,architectures,mxfp8_moe"


def ask(python: Path, source: Path) -> dict[str, Any]:
    """Return a tree's answers (probes/probe_flashinfer.py) by question."""
    out = source.parent / f"{source.name}.json"
    variables = {
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        "FLASHINFER_WORKSPACE_BASE": str(source.parent / "workspace"),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
    }
    run_module(
        python, "probe_flashinfer", QUESTIONS, out, folder=source.parent, variables=variables
    )
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result
