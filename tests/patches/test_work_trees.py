"""The real series as work trees: exporting what nobody touched changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.pins import pins
from tests.patches.checkout import CHECKOUT, ROOT

UPSTREAMS = sorted(pins.load(CHECKOUT / "pins.yaml").upstreams)


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_an_untouched_work_tree_exports_to_the_same_bytes(upstream: str, tmp_path: Path) -> None:
    for words in (("apply", upstream, "tree"), ("export", "--check", "tree")):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sparkforge",
                "patches",
                *words,
                "--pins",
                str(CHECKOUT / "pins.yaml"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to write" in done.stdout
