"""The store: nothing half-made gets a final name, locks go with their holder, leftovers go."""

import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core.disk import key_of
from sparkforge.core.errors import IntegrityError
from sparkforge.store.store import Store, code_of
from tests.codecopy import CodeCopy
from tests.support import ROOT, sha256

INPUTS = {"a": 1, "b": ["x"]}


@dataclass(frozen=True)
class Made:
    file: object


def put(folder: Path) -> Made:
    (folder / "file").write_text("content")
    return Made("file")


def never(folder: Path) -> Made:
    raise AssertionError("must not be made again")


def test_artefact_is_built_once(store: Store) -> None:
    made = store.build("wheels", INPUTS, Made, put)
    found = store.build("wheels", {"b": ["x"], "a": 1}, Made, never)
    assert found == made
    assert (made.path / "file").read_text() == "content"
    assert made.key == key_of(INPUTS)
    assert Store(store.root).find("wheels", INPUTS, Made) == made


def test_failed_build_keeps_the_old_and_leaves_nothing(store: Store) -> None:
    def fail(folder: Path) -> Made:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.build("wheels", INPUTS, Made, fail)
    assert store.find("wheels", INPUTS, Made) is None
    made = store.build("wheels", INPUTS, Made, put)
    (made.path / "old").touch()
    with pytest.raises(KeyboardInterrupt):
        store.build("wheels", INPUTS, Made, fail, again=True)
    assert (made.path / "old").exists()
    again = store.build("wheels", INPUTS, Made, put, again=True)
    assert again.path == made.path
    assert not (again.path / "old").exists()
    assert list((store.root / "tmp").iterdir()) == []


def test_sweep_removes_folders_of_killed_runs_only(store: Store) -> None:
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
    other = path.with_name("my-document")
    other.mkdir()
    store.sweep()
    assert path.is_dir()
    child.kill()
    child.communicate()
    store.sweep()
    assert (path.exists(), other.exists()) == (False, True)


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
    assert store.build("wheels", INPUTS, Made, put).path.is_dir()


def test_clean_spares_the_work_of_builds(store: Store) -> None:
    other = Store(store.root)
    with other.temporary("series") as work:
        store.clean()
        assert work.is_dir()
    assert other.build("wheels", INPUTS, Made, put).path.is_dir()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("wheels/overlay.py", True),
        ("build/packs/include/cublasLt.h", True),
        ("core/disk.cpython-311.pyc.140234", False),  # which another process is writing
        ("cli/main.py", False),
        ("check/__init__.py", False),
    ],
)
def test_keys_have_the_code_of_the_build(code: CodeCopy, file: str, changes: bool) -> None:
    before = code_of("sparkforge.build.graph")
    code.change(file)
    assert (code_of("sparkforge.build.graph") != before) == changes
