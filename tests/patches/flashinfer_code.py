"""FlashInfer's own Python code, asked in a process whose path starts with one of its trees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.patches import probing
from tests.patches.checkout import ROOT

QUESTIONS = "autotuner,architectures,mxfp8_moe"


def ask(python: Path, source: Path) -> Any:
    """Return a tree's answers (probes/probe_flashinfer.py) by question."""
    variables = {
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        "FLASHINFER_WORKSPACE_BASE": str(source.parent / "workspace"),
        "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
    }
    probe = "probe_flashinfer"
    return probing.ask(python, probe, QUESTIONS, folder=source.parent, variables=variables)
