"""build.py: the environment is made once, whole or not at all, and left alone afterwards.

A small checkout stands in for the real one. Its environment is made by Python's venv once; where a
test needs one more, a copy of that stands in for it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE_S, ROOT, make_wheel, sha256, wait_for

MAIN = """
import json, sys, tiny
print(json.dumps({"argv": sys.argv[1:], "prefix": sys.prefix}))
"""

# in place of the standard library's: what it makes, less what build.py adds to it
VENV = """
import os, shutil, sys, time
starter = os.getppid()
left_out = shutil.ignore_patterns("sparkforge.stamp", "tiny*")
shutil.copytree(os.environ["MADE_VENV"], sys.argv[-1], symlinks=True, ignore=left_out)
while "HELD" in os.environ and os.getppid() == starter:
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose environment has been set up once."""
    folder = tmp_path_factory.mktemp("made") / "check out"
    new_checkout(folder)
    run(folder)
    return folder


@pytest.fixture
def quick(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have environments made of the one that there is."""
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "venv.py").write_text(VENV)
    monkeypatch.setenv("MADE_VENV", str(made / ".venv"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "quick"))


def new_checkout(folder: Path) -> None:
    wheel = make_wheel(folder.parent / "links", "tiny", "1.0", {"tiny.py": b""})
    lock = folder / "requirements" / "driver.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"tiny==1.0 --hash=sha256:{sha256(wheel.read_bytes())}\n")
    (folder / "sparkforge").mkdir()
    (folder / "sparkforge" / "__init__.py").touch()
    (folder / "sparkforge" / "__main__.py").write_text(MAIN)
    shutil.copy(ROOT / "build.py", folder)


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(checkout.parent / "links"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [sys.executable, checkout / "build.py", *arguments],
        cwd=checkout.parent,
        env={**os.environ, **settings},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(checkout: Path, *arguments: str) -> Any:
    child = start(checkout, *arguments)
    out, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, err
    return {**json.loads(out), "err": err}


def snapshot(folder: Path) -> Mapping[str, tuple[int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (stat.st_mtime_ns, stat.st_ino) for path, stat in found.items()}


def test_warm_start_changes_nothing(made: Path) -> None:
    before = snapshot(made)
    shutil.move(made.parent / "links", made.parent / "away")  # nothing is looked up
    told = run(made, "--target", "x y", "", "--json")
    shutil.move(made.parent / "away", made.parent / "links")
    assert told == {
        "argv": ["--target", "x y", "", "--json"],
        "prefix": str(made / ".venv"),
        "err": "",
    }
    assert snapshot(made) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("harm", ["stamp", "python", "lock"])
def test_broken_environment_is_recreated(made: Path, tmp_path: Path, harm: str) -> None:
    checkout = tmp_path / "check out"
    shutil.copytree(made, checkout, symlinks=True)
    shutil.copytree(made.parent / "links", tmp_path / "links")
    venv = checkout / ".venv"
    if harm == "stamp":
        (venv / "sparkforge.stamp").unlink()
    elif harm == "python":  # the system's Python was removed
        for name in (venv / "bin").glob("python*"):
            name.unlink()
            name.symlink_to("/nowhere/python")
    else:
        with (checkout / "requirements" / "driver.txt").open("a") as lock:
            lock.write("# another lock\n")
    (checkout / ".venv.new-1").mkdir()  # of a run that was killed
    told = run(checkout)
    assert "setting up .venv" in told["err"]
    assert told["prefix"] == str(venv)
    assert sorted(path.name for path in checkout.glob(".venv*")) == [".venv", ".venv.lock"]
    assert run(checkout)["err"] == ""


@pytest.mark.usefixtures("quick")
def test_parallel_first_starts_set_up_once(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    new_checkout(checkout)
    children = [start(checkout) for _ in range(2)]
    results = [child.communicate(timeout=PATIENCE_S) for child in children]
    assert [child.returncode for child in children] == [0, 0], results
    assert sum("setting up" in err for _, err in results) == 1


@pytest.mark.usefixtures("quick")
def test_wrong_hash_is_refused(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    new_checkout(checkout)
    lock = checkout / "requirements" / "driver.txt"
    lock.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    child = start(checkout)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 8
    assert "hint: " in err and "Traceback" not in err
    assert [path.name for path in checkout.glob(".venv*")] == [".venv.lock"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_interrupted_setup_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    checkout = tmp_path / "checkout"
    new_checkout(checkout)
    monkeypatch.setenv("HELD", "")  # or a set-up could be over before the signal comes
    child = start(checkout)
    monkeypatch.delenv("HELD")
    wait_for(lambda: bool(list(checkout.glob(".venv.new-*/bin/python"))))
    child.send_signal(number)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == code
    assert not (checkout / ".venv").exists()
    told = run(checkout)
    assert "setting up" in told["err"]
    assert not list(checkout.glob(".venv.new-*"))
