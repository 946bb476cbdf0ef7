"""The real series as work trees: exporting what nobody touched changes nothing."""

import sys
from pathlib import Path

import pytest

from sparkforge.core.run import call
from tests.patches.checkout import CHECKOUT, PINS, ROOT

UPSTREAMS = sorted(PINS.upstreams)


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_an_untouched_work_tree_exports_to_the_same_bytes(upstream: str, tmp_path: Path) -> None:
    for words in (("apply", upstream, "tree"), ("export", "--check", "tree")):
        command = (sys.executable, "-m", "sparkforge", "patches", *words)
        env = {"PYTHONPATH": str(ROOT)}
        done = call(*command, "--pins", CHECKOUT / "pins.yaml", cwd=tmp_path, env=env)
    assert b"nothing to write" in done.stdout
