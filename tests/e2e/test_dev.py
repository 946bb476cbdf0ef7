"""The dev loop on the real vLLM: in a virtual environment, and in a container with compilers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import on_base

MARK = "\nSPARKFORGE_EDITED = 7\n"
LOOK = "import vllm; print(getattr(vllm, 'SPARKFORGE_EDITED', None), vllm.__file__)"
MESSAGE = """\
Mark the package as edited

The dev loop's own test commits this, to see that what is edited in it
comes back as a patch; nobody carries it.

Upstream-Status: Inappropriate a test
Drop-when: test; at once
Risk: build
Test: tests/e2e/test_dev.py::test_a_container_has_compilers_and_sees_edits
"""


def dev(checkout: Path, folder: Path, options: list[str], *command: str) -> str:
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
            *options,
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
    plain = ["--engine", "none"]
    version = "import torch, vllm.platforms; print(vllm.platforms.current_platform.device_name)"
    assert dev(checkout, tmp_path, plain, "python", "-c", version) == "cpu"
    tree = tmp_path / "vllm"
    before = dates(tree)
    edit(tree)
    seen = dev(checkout, tmp_path, plain, "python", "-c", LOOK)
    assert seen == f"7 {tmp_path}/.links/environment/vllm/__init__.py"
    after = dates(tree)
    assert {path for path in before if before[path] != after[path]} == {tree / "vllm/__init__.py"}
    assert "uncommitted changes: vllm/__init__.py" in export(checkout, tree).stderr
    subprocess.run(["git", "-C", tree, "checkout", "--quiet", "."], check=True)
    assert export(checkout, tree, "--check").returncode == 0


@pytest.fixture
def image(base_image: str) -> list[str]:
    return ["--engine", "docker", *on_base(base_image)]


def test_a_container_has_compilers_and_sees_edits(
    checkout: Path, tmp_path: Path, image: list[str]
) -> None:
    tree = tmp_path / "vllm"
    assert dev(checkout, tmp_path, image, "sh", "-c", "cd vllm && git log --oneline | wc -l") > "1"
    edit(tree)
    script = f"""set -e
cd vllm
python -I -c "{LOOK}" >../seen
echo 'int main() {{ return 7; }}' >../main.cc
g++ -c ../main.cc -o ../main.o && ccache --show-stats >../stats && command -v g++ >../compiler
mkdir ../t && echo 'import vllm
def test_it(): assert vllm.SPARKFORGE_EDITED == 7' >../t/test_it.py
pytest -q ../t
git config user.email x@example.invalid && git config user.name X
git commit --quiet --all --file=- <<'END'
{MESSAGE}
END
echo done"""
    assert dev(checkout, tmp_path, image, "sh", "-c", script) == "done"
    seen = (tmp_path / "seen").read_text().split()
    assert seen == ["7", "/opt/sparkforge/overlay/vllm/__init__.py"]
    assert (tmp_path / "compiler").read_text().strip() == "/usr/lib/ccache/g++"
    assert (tmp_path / "main.o").stat().st_uid == os.getuid()
    changed = export(checkout, tree, "--check")
    assert changed.returncode == 3
    assert "would change mark-the-package-as-edited.patch" in changed.stderr
    status = subprocess.run(
        ["git", "-C", tree, "status", "--porcelain", "--ignored"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert status == ""
