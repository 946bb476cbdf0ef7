"""What the decode kernels' Python side answers, and the tables that their CUDA sources print."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.patches import probing
from tests.patches.checkout import CHECKOUT

TIMEOUT_S = 1800
CAPABILITIES = ("8.9", "9.0", "12.1")


class Steps(dict[str, Any]):
    """What is computed, by step; a step that failed is its traceback, and fails who asks for it."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        assert not isinstance(found, str), found
        return found


def layout(folder: Path) -> Any:
    """Return what the index functions of the CUDA sources say; None without a compiler."""
    if shutil.which("nvcc") is None:
        return None
    program = folder / "layout"
    probe = Path(__file__).with_name("probes") / "probe_decode_layout.cu"
    words = ["nvcc", "-std=c++17", "-O0", "-arch=sm_90a", f"-I{CHECKOUT / 'kernels/csrc'}"]
    subprocess.run([*words, "-o", str(program), str(probe)], check=True, timeout=TIMEOUT_S)
    return json.loads(subprocess.run([program], capture_output=True, check=True).stdout)


def ask(python: Path, places: Any, folder: Path) -> Any:
    """Return what probe_decode_kernels.py writes; ``places`` is what ``layout`` returns."""
    request = {"places": places, "capabilities": CAPABILITIES}
    answers = probing.ask(python, "probe_decode_kernels", request, folder=folder)
    return answers | {"computed": Steps(answers["computed"])}
