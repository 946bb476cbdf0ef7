"""Forked probes are as far from each other as processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patches.forks import Forks, forking
from tests.support import PATIENCE_S, alive, wait_for


@pytest.fixture
def forks() -> Iterator[Forks]:
    with forking(Path(sys.executable), {"ONE": "1"}, ["wave"]) as one:
        yield one


def script(folder: Path, code: str) -> Path:
    path = folder / "script.py"
    path.write_text(code)
    return path


def test_a_script_sees_what_a_started_one_sees(forks: Forks, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "beside.py").write_text("HERE = 'beside'\n")
    code = """
import beside, os, sys
print(__name__, beside.HERE, sys.argv[1:], os.getcwd(), os.environ["ONE"], sys.stdin.read())
print("told", file=sys.stderr)
"""
    done, said = forks.run([script(tmp_path, code), "a", "b"], elsewhere, PATIENCE_S)
    assert done == 0
    assert said.splitlines() == ["told", f"__main__ beside ['a', 'b'] {elsewhere} 1 "]


def test_a_module_sees_what_a_started_one_sees(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("import sys; print(__spec__.name, sys.argv)\n")
    done = forks.run(["package.inner", "a"], tmp_path, PATIENCE_S, module=True)
    assert done == (0, f"package.inner ['{tmp_path}/package/inner.py', 'a']\n")


def test_nothing_is_left_for_the_next_one(forks: Forks, tmp_path: Path) -> None:
    code = """
import os, sys, wave
print(hasattr(wave, "left"), "LEFT" in os.environ, "left" in sys.modules, len(sys.path))
wave.left = True
os.environ["LEFT"] = sys.modules["left"] = "left"
sys.path.append("left")
os.chdir("/")
"""
    first, second = (forks.run([script(tmp_path, code)], tmp_path, PATIENCE_S) for _ in range(2))
    assert first == second
    assert first[1].startswith("False False False ")


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last"),
    ],
)
def test_an_end_is_told(forks: Forks, tmp_path: Path, code: str, exit_code: int, said: str) -> None:
    found, printed = forks.run([script(tmp_path, code)], tmp_path, PATIENCE_S)
    assert found == exit_code
    assert said in printed


def test_what_takes_too_long_ends_with_all_that_it_started(forks: Forks, tmp_path: Path) -> None:
    code = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
open("new", "w").write(str(child.pid))
os.rename("new", "child")
signal.pause()
"""
    for limit_s in (1, 10, 100):  # a busy machine may not come to the child in the first
        with pytest.raises(AssertionError, match=r"no end within"):
            forks.run([script(tmp_path, code)], tmp_path, limit_s)
        if (tmp_path / "child").exists():
            break
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not alive(child))
    assert forks.run([script(tmp_path, "print(1)")], tmp_path, PATIENCE_S) == (0, "1\n")


def test_threads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with (
        forking(Path(sys.executable), {"PYTHONPATH": str(tmp_path)}, ["busy"]) as forks,
        pytest.raises(AssertionError, match="2 threads"),
    ):
        forks.run(["none"], tmp_path, PATIENCE_S)
