"""`bench quality` on the tiny checkpoint: the scores mean nothing, the mechanism is real."""

import json
import subprocess
import sys
from pathlib import Path

from sparkforge.core.errors import CheckError


def test_fewer_bits_differ_more(checkout: Path) -> None:
    words = (
        "--target cpu --engine none --layers lm_head=mxfp8 --layers qkv,o,lm_head"
        " --tokens 4 --max-kl 1e-12 --json"
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
    eight, four = found["layers"]["lm_head=mxfp8"], found["layers"]["qkv,o,lm_head"]
    assert eight["positions"] == four["positions"] == 96
    assert 0 < eight["mean_kl"] < four["mean_kl"] / 3
    assert eight["covered"] > 0.99
    assert "Traceback" not in done.stderr
    (file,) = checkout.glob("dist/cpu/bench/*-quality/quality.json")
    assert json.loads(file.read_text()) == found
