"""`bench quality` on the tiny checkpoint: the scores mean nothing, the mechanism is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sparkforge.core.errors import CheckError


def test_the_gate_sees_what_is_beyond_noise(checkout: Path) -> None:
    words = (
        "--target cpu --engine none --layers lm_head=mxfp8 --layers qkv,o,lm_head"
        " --prompts 4 --tokens 24 --json"
    )
    done = subprocess.run(
        [sys.executable, checkout / "build.py", "bench", "quality", *words.split()],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CheckError.exit_code, done.stderr
    found = json.loads(done.stdout)
    noise, layers = found["noise"], found["layers"]
    eight, four = layers["lm_head=mxfp8"], layers["qkv,o,lm_head"]
    assert noise["positions"] == eight["positions"] == 96
    # the same weights in batches of other shapes, then dense layers in 8 and in 4 bits
    assert noise["mean_kl"] < eight["mean_kl"] / 3 < four["mean_kl"] / 9
    assert noise["agreement"] > 0.95
    assert eight["covered"] > 0.99
    assert any(one.startswith("qkv,o,lm_head: mean KL") for one in found["beyond"])
    assert "qkv,o,lm_head: mean KL" in done.stderr
    assert "Traceback" not in done.stderr
    (file,) = checkout.glob("dist/cpu/bench/*-quality/quality.json")
    assert json.loads(file.read_text()) == found
