"""The store: nothing half-made gets a final name, locks go with their holder, leftovers go."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core.disk import disk_errors, key_of
from sparkforge.core.errors import IntegrityError, StoreError
from sparkforge.store.store import Store, code_of
from tests.codecopy import CodeCopy
from tests.support import PATIENCE_S, ROOT, sha256

INPUTS = {"a": 1, "b": ["x"]}


@dataclass(frozen=True)
class Made:
    file: object


def put(folder: Path) -> Made:
    (folder / "file").write_text("content")
    return Made("file")


def never(folder: Path) -> Made:
    raise AssertionError("must not be made again")


def test_reading_creates_no_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.find("wheels", INPUTS, Made) is None
    assert store.last("cpu", "wheel") is None
    assert store.sweep() == 0
    assert list(tmp_path.iterdir()) == []


def test_artefact_is_built_once(store: Store) -> None:
    made = store.build("wheels", INPUTS, Made, put)
    found = store.build("wheels", {"b": ["x"], "a": 1}, Made, never)
    assert found == made
    assert (made.path / "file").read_text() == "content"
    assert made.key == key_of(INPUTS)
    assert Store(store.root).find("wheels", INPUTS, Made) == made


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_failed_build_leaves_nothing(store: Store, error: BaseException) -> None:
    def fail(folder: Path) -> Made:
        put(folder)
        raise error

    with pytest.raises(type(error)):
        store.build("wheels", INPUTS, Made, fail)
    assert store.find("wheels", INPUTS, Made) is None
    assert list((store.root / "tmp").iterdir()) == []
    assert store.build("wheels", INPUTS, Made, put).result == Made("file")


def test_rebuild_keeps_old_artefact_until_done(store: Store) -> None:
    made = store.build("wheels", INPUTS, Made, put)

    def fail(folder: Path) -> Made:
        raise ValueError(folder)

    with pytest.raises(ValueError, match="wheels"):
        store.build("wheels", INPUTS, Made, fail, again=True)
    assert made.path.is_dir()
    (made.path / "old").touch()
    again = store.build("wheels", INPUTS, Made, put, again=True)
    assert again.path == made.path
    assert not (again.path / "old").exists()
    assert list((store.root / "tmp").iterdir()) == []


def test_sweep_removes_folders_of_killed_runs_only(store: Store) -> None:
    with store.temporary("mine") as mine:
        left, other = mine.with_name("sparkforge-x-dead"), mine.with_name("my-document")
        for folder in (left, other):
            (folder / "deep").mkdir(parents=True)
        left.with_name(f"{left.name}.lock").touch()
        assert Store(store.root).sweep() == 1
        assert {path.name for path in mine.parent.iterdir()} == {
            mine.name,
            f"{mine.name}.lock",
            other.name,
        }
    assert not mine.exists()


def test_sweep_spares_another_process(store: Store) -> None:
    code = """
import sys, pathlib
from sparkforge.store.store import Store
with Store(pathlib.Path(sys.argv[1])).temporary("theirs") as path:
    print(path, flush=True)
    sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, store.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    assert (store.sweep(), path.is_dir()) == (0, True)
    child.kill()
    child.communicate()
    assert (store.sweep(), path.exists()) == (1, False)


def test_last_artefact_is_remembered(store: Store) -> None:
    label = "wheel vllm (unpatched)"
    assert store.last("cpu", label) is None
    made = store.build("wheels", INPUTS, Made, put)
    store.remember("cpu", label, made)
    assert store.last("cpu", label) == {"key": made.key, "inputs": INPUTS}
    note = store.root / "last" / "cpu" / f"{label}.json"
    for damaged in ("{}", note.read_text().replace(made.key, "0" * 64), '{"key": 1, "inputs": 2}'):
        note.write_text(damaged)
        assert store.last("cpu", label) is None
        store.clean(superseded=True)


# -- downloads ------------------------------------------------------------------


def test_only_a_download_with_its_hash_is_named(store: Store) -> None:
    store.build("wheels", INPUTS, Made, put)
    partial = store.partial_path(sha256(b"data"))
    partial.write_bytes(b"atad")
    with pytest.raises(IntegrityError):
        store.accept_download(partial, sha256(b"data"), "data.whl")
    assert not partial.exists()
    assert list((store.root / "downloads").iterdir()) == []
    partial.write_bytes(b"data")
    final = store.accept_download(partial, sha256(b"data"), "data.whl")
    assert final == store.download_path(sha256(b"data"), "data.whl")
    assert stat.S_IMODE(final.stat().st_mode) == 0o444
    assert not partial.exists()


# -- cleaning ---------------------------------------------------------------------


def test_clean_keeps_downloads_and_the_newest(store: Store) -> None:
    old, new = (store.build("wheels", {"n": n}, Made, put) for n in (1, 2))
    for made in (old, new):
        store.remember("cpu", "wheel", made)
    kept = store.download_path(sha256(b""), "x")
    kept.parent.mkdir()
    kept.write_bytes(b"")
    assert store.clean(superseded=True) > 0
    assert (old.path.exists(), new.path.is_dir()) == (False, True)
    assert store.clean() > 0
    assert (new.path.exists(), kept.exists()) == (False, True)
    store.clean(everything=True)
    assert not kept.exists()
    assert store.build("wheels", INPUTS, Made, put).path.is_dir()


def test_clean_waits_for_builds(store: Store) -> None:
    other = Store(store.root)
    with other.temporary("series") as work:
        store.clean(everything=True)
        assert work.is_dir()
    assert other.build("wheels", INPUTS, Made, put).path.is_dir()
    cleaned = threading.Event()

    def clean() -> None:
        store.clean(everything=True)
        cleaned.set()

    with other.lock("wheels-x"):
        threading.Thread(target=clean, daemon=True).start()
        assert not cleaned.wait(0.2)
    assert cleaned.wait(PATIENCE_S)


def test_removed_store_is_a_store_error(store: Store) -> None:
    store.build("wheels", INPUTS, Made, put)
    store.clean(everything=True)
    with pytest.raises(StoreError), disk_errors(store.partial_path("0" * 64)):
        store.partial_path("0" * 64).write_bytes(b"")


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "tmp" / "mine" / "file"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    store = Store(tmp_path)
    assert store.sweep() == 0
    for act in (
        lambda: store.clean(everything=True),
        lambda: store.clean(superseded=True),
        lambda: store.build("wheels", INPUTS, Made, put),
    ):
        with pytest.raises(StoreError, match="not a sparkforge store"):
            act()
    assert kept.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == ["tmp"]


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "below"])
def test_file_as_store_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be created in it[\s\S]*--store DIR"):
        Store(tmp_path / "file" / below).build("wheels", INPUTS, Made, put)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("wheels/overlay.py", True),
        ("build/packs/include/cublasLt.h", True),
        ("core/git.py", True),
        ("cli/main.py", False),
        ("check/__init__.py", False),
        ("maintain/__init__.py", False),
        ("release/__init__.py", False),
    ],
)
def test_keys_have_the_code_of_the_build(code: CodeCopy, file: str, changes: bool) -> None:
    before = code_of("sparkforge.build.graph")
    code.change(file)
    assert (code_of("sparkforge.build.graph") != before) == changes
