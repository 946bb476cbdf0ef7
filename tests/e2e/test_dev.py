"""The dev loop on the real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MARK = "\nSPARKFORGE_EDITED = 7\n"
LOOK = "import vllm; print(getattr(vllm, 'SPARKFORGE_EDITED', None), vllm.__file__)"


def dev(checkout: Path, folder: Path, *command: str) -> str:
    """Run a command in the loop; returns its last line."""
    done = subprocess.run(
        [
            sys.executable,
            "build.py",
            "dev",
            "--target",
            "cpu",
            "--dir",
            folder,
            "--",
            *command,
        ],
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def export(checkout: Path, tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "build.py", "patches", "export", tree, *words],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )


def edit(tree: Path) -> None:
    path = tree / "vllm" / "__init__.py"
    path.write_text(path.read_text() + MARK)


def dates(tree: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (tree / "vllm").rglob("*.py")}


def test_an_edit_of_vllm_acts_without_a_build(checkout: Path, tmp_path: Path) -> None:
    version = "import torch, vllm.platforms; print(vllm.platforms.current_platform.device_name)"
    assert dev(checkout, tmp_path, "python", "-c", version) == "cpu"
    tree = tmp_path / "vllm"
    before = dates(tree)
    edit(tree)
    seen = dev(checkout, tmp_path, "python", "-c", LOOK)
    assert seen == f"7 {tmp_path}/.links/environment/vllm/__init__.py"
    after = dates(tree)
    assert {path for path in before if before[path] != after[path]} == {tree / "vllm/__init__.py"}
    assert "uncommitted changes: vllm/__init__.py" in export(checkout, tree).stderr
    subprocess.run(["git", "-C", tree, "checkout", "--quiet", "."], check=True)
    assert export(checkout, tree, "--check").returncode == 0
