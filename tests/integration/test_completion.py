"""Tab completion: bash calls argcomplete's own function, which starts build.py as a user does.

zsh's works at a terminal only, so keys are typed there.
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import argcomplete
import pytest

from build import ensure_environment
from tests.support import PATIENCE_S, ROOT, wait_for

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


ZSHRC = """
autoload -Uz compinit && compinit -u -D
eval "$(.venv/bin/python -m argcomplete.scripts.activate_global_python_argcomplete --dest=-)"
show() { print -r -- "$BUFFER" >>"$ZDOTDIR/lines"; BUFFER= }
zle -N show
bindkey '^G' show
zle-line-init() { : >"$ZDOTDIR/ready" }
zle -N zle-line-init
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


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Give both ends of a terminal; what is written to it is thrown away."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        try:
            while os.read(ours, 1 << 16):
                pass
        except OSError:
            pass  # the last program at it has ended

    reader = Thread(target=drain)
    reader.start()
    try:
        yield ours, theirs
    finally:
        os.close(theirs)
        reader.join(PATIENCE_S)
        os.close(ours)


def typed(folder: Path, *lines: str) -> list[str]:
    """Return lines of zsh after Tab at their ends."""
    (folder / ".zshrc").write_text(ZSHRC)
    found = folder / "lines"
    found.touch()
    env = {**os.environ, "ZDOTDIR": str(folder), "TERM": "xterm"}

    def shown(number: int) -> bool:
        return len(found.read_text().splitlines()) == number

    with terminal() as (ours, theirs):
        zsh = subprocess.Popen(
            ["zsh", "-d", "-i"],  # without the system's own settings
            cwd=ROOT,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        try:
            wait_for((folder / "ready").exists)
            for number, line in enumerate(lines, 1):
                os.write(ours, f"{line}\t\a".encode())  # Tab, then Ctrl-G
                wait_for(partial(shown, number))
        finally:
            zsh.kill()
            zsh.wait()
    return found.read_text().splitlines()


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


def test_zsh_completes_too(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh on this machine")
    lines = {
        "python3 build.py verif": "python3 build.py verify ",
        "./build.py --targ": "./build.py --target ",
        "python3 build.py --target s": "python3 build.py --target spark ",
    }
    assert typed(tmp_path, *lines) == list(lines.values())


def test_every_command_is_offered() -> None:
    assert {"doctor", "build", "release", "--version"} <= set(tab("python3 build.py "))


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
