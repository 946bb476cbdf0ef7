"""`bench quality` on the tiny checkpoint: the scores mean nothing, the mechanism is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sparkforge.core.errors import QualityError


def test_the_gate_lets_mxfp8_pass_and_stops_mxfp4(checkout: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            checkout / "build.py",
            "bench",
            "quality",
            "--target",
            "cpu",
            "--engine",
            "none",
            "--layers",
            "lm_head=mxfp8",
            "--layers",
            "qkv,o,lm_head",
            "--prompts",
            "2",
            "--questions",
            "3",
            "--tokens",
            "48",
            "--max-kl",
            "0.05",
            "--min-agreement",
            "0",
            "--json",
        ],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == QualityError.exit_code, done.stderr
    found = json.loads(done.stdout)
    noise = found["as_it_is"]["noise"]
    assert noise["mean_kl"] < 1e-6
    assert noise["agreement"] == 1
    eight, four = found["layers"]["lm_head=mxfp8"], found["layers"]["qkv,o,lm_head"]
    assert noise["positions"] == eight["positions"] == 96
    assert 1e-5 < eight["mean_kl"] < 0.05 < four["mean_kl"]
    assert eight["covered"] > 0.99
    assert [line.partition(":")[0] for line in found["beyond"]] == ["qkv,o,lm_head"]
    assert "qkv,o,lm_head: mean KL" in done.stderr
    assert "Traceback" not in done.stderr
