"""The folder of compiled kernels: its name, its variables, and what is removed from it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sparkforge.serving import caches, state
from tests.support import finished, python

HOLD = (
    "import sys; from pathlib import Path; from sparkforge.serving import caches;"
    " caches.hold(Path(sys.argv[1]), sys.argv[2], {}); print('held', flush=True);"
    " sys.stdin.read() if len(sys.argv) > 3 else None"
)


def note(share: Path, **parts: object) -> Path:
    share.mkdir(exist_ok=True)
    found = dict.fromkeys((*caches._PARTS, "release"), "x") | {"compose": "y"} | parts
    (share / "inputs.json").write_text(json.dumps({"image": found}))
    return share


def test_a_key_names_the_release_and_what_compiles(tmp_path: Path) -> None:
    key = caches.build_key(note(tmp_path), "0.33.0+spark1")
    assert key.startswith("0.33.0+spark1-")
    assert caches.build_key(note(tmp_path, compose="z"), "0.33.0+spark1") == key
    assert caches.build_key(note(tmp_path, wheels="z"), "0.33.0+spark1") != key
    assert caches.build_key(tmp_path / "none", "../x") == caches.build_key(tmp_path / "no", "../x")
    assert "/" not in caches.build_key(tmp_path / "none", "../x")


def held(root: Path, build: str) -> None:
    finished(python(HOLD, root, build))


def test_the_last_builds_are_kept(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()  # not of ours
    for number, build in enumerate(("a", "b", "c", "d")):
        held(tmp_path, build)
        for lock in tmp_path.glob(f"{build}-*.lock"):
            os.utime(lock, (number, number))
    held(tmp_path, "e")
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"models", "c", "d", "e"}


def test_the_folder_of_a_running_server_stays(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*python_words(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"held\n"
    for lock in tmp_path.glob("a-*.lock"):
        os.utime(lock, (0, 0))
    for build in ("b", "c", "d", "e"):
        held(tmp_path, build)
    assert list(tmp_path.glob("a-*/triton"))
    running.communicate()


def python_words(root: Path) -> list[str]:
    import sys

    return [sys.executable, "-c", HOLD, str(root), "a", "wait"]


def test_variables_point_into_the_folder_unless_the_user_has_set_them(tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    found = caches.hold(tmp_path / "jit", "a", {"TRITON_CACHE_DIR": own, "HOME": "/root"})
    assert found.variables["TRITON_CACHE_DIR"] == own
    assert found.variables["HOME"] == str(found.folder / "home")
    inside = set(found.variables.values()) - {own}
    assert all(Path(path).is_dir() and path.startswith(str(found.folder)) for path in inside)


def test_a_state_of_an_earlier_start_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "path", lambda: tmp_path / "state.json")
    assert state.read().text == state.READY
    state.tell("loading")
    assert state.read() == state.State("loading")
    monkeypatch.setattr(state, "this_start", lambda: "another")
    assert state.read().text == state.READY
    for text in ("", "[]", '{"start": "another"}'):
        (tmp_path / "state.json").write_text(text)
        assert state.read().text == state.READY
