"""The Dockerfile's own scripts, run on environments made by the real uv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.runtime.interpreter import uv_program
from tests.support import ROOT, make_wheel


@pytest.fixture
def check(tmp_path: Path) -> Path:
    """The script that holds what is installed against its own requirements, for our folders."""
    recipe = (ROOT / "Dockerfile").read_text()
    found = re.search(r"/tools/check\n(.*?)\nEOS\n", recipe, re.DOTALL)
    assert found is not None
    script = tmp_path / "check"
    text = found[1].replace("/run/tools/uv", str(uv_program()))
    script.write_text(text.replace("/opt/sparkforge/venv", str(tmp_path / "venv")))
    script.chmod(0o755)
    return script


def install(folder: Path, *wheels: Path) -> None:
    uv, venv = uv_program(), folder / "venv"
    subprocess.run(
        [uv, "venv", "--quiet", "--offline", "--python", sys.executable, venv], check=True
    )
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", venv, *wheels],
        check=True,
    )


def said(script: Path) -> tuple[int, str]:
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def strange(folder: Path, name: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel whose name fits every machine and that notes a platform inside that none is."""
    note = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-manylinux2014_sbsa\n"
    return make_wheel(
        folder, name, requires=requires, files={f"{name}.py": b""}, info={"WHEEL": note}
    )


def test_a_strange_platform_inside_of_a_wheel_is_no_failure(check: Path, tmp_path: Path) -> None:
    install(tmp_path, strange(tmp_path, "one"), make_wheel(tmp_path, "two", files={"two.py": b""}))
    code, words = said(check)
    assert "`one` was built for a different platform" in words  # uv still sees it
    assert code == 0


def test_a_missing_requirement_is_one_beside_a_strange_platform_too(
    check: Path, tmp_path: Path
) -> None:
    install(tmp_path, strange(tmp_path, "one", requires=("three>=2",)))
    code, words = said(check)
    assert code != 0
    assert "requires `three>=2`" in words.splitlines()[-1]


def test_all_well_is_no_words_at_all(check: Path, tmp_path: Path) -> None:
    install(tmp_path, make_wheel(tmp_path, "two", files={"two.py": b""}))
    assert said(check) == (0, "")


def test_a_check_that_could_not_be_made_is_a_failure(check: Path) -> None:
    code, words = said(check)  # there is no environment
    assert code != 0
    assert words
