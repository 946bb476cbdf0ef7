"""Tab completion: bash calls argcomplete's own function, which starts build.py as a user does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import argcomplete
import pytest

from build import ensure_environment
from tests.support import ROOT

SCRIPT = Path(argcomplete.__file__).parent / "bash_completion.d" / "_python-argcomplete"
# what bash sets before it calls the function that `complete -D -F` has registered
TAB = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9
read -ra COMP_WORDS <<<"$2"
[[ $2 != *" " ]] || COMP_WORDS+=("")
compopt() { :; }
_python_argcomplete_global "${COMP_WORDS[0]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def tab(line: str, folder: Path = ROOT) -> list[str]:
    """Return what bash offers at the end of a line."""
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", SCRIPT, line],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    ensure_environment(ROOT / ".venv", ROOT / "requirements" / "driver.txt")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python3 build.py verif", ["verify"]),
        ("./build.py --targ", ["--target"]),  # the default command's
        ("python3 build.py --target s", ["spark"]),  # out of pins.yaml
        ("python3 build.py bench --v", ["--verbose", "--vs"]),  # `bench run`
        ("./build.py patches app", ["apply"]),
        ("./build.py build --engine d", ["docker"]),
        ("./build.py serve --target cpu -- --po", []),  # vLLM's options
        ("./build.py nonsense --t", []),
    ],
)
def test_a_line_is_completed(line: str, offered: list[str]) -> None:
    assert sorted(tab(line)) == offered


def test_every_command_is_offered() -> None:
    assert {"doctor", "build", "release", "sign", "--version"} <= set(tab("python3 build.py "))


def test_a_tab_installs_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "build.py", tmp_path)
    lock = tmp_path / "requirements" / "driver.txt"
    lock.parent.mkdir()
    lock.write_text("")
    assert tab("./build.py verif", tmp_path) == []
    made = tmp_path / ".venv" / "sparkforge.stamp"
    made.parent.mkdir()
    made.write_text("of another lock")  # after a `git pull`
    assert tab("./build.py verif", tmp_path) == []
    assert made.read_text() == "of another lock"
    names = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {".venv", "build.py", "requirements"}


def test_argcomplete_is_imported_for_a_tab_alone() -> None:
    code = (
        "import sys; sys.argv = ['build.py', '--exit-codes']\n"
        "from sparkforge.cli import main\n"
        "main.main(); print('argcomplete' in sys.modules)"
    )
    python = ROOT / ".venv" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
