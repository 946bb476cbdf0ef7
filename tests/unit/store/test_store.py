"""The store: nothing half-made gets a final name, locks go with their holder, leftovers go."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import IntegrityError, StoreError
from sparkforge.core.hashing import code_digest, key_of, sha256_file
from sparkforge.store.store import Store
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


def test_a_store_leaves_no_trace_until_something_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.find("wheels", INPUTS, Made) is None
    assert store.last("cpu", "wheel") is None
    assert store.sweep() == 0
    assert list(tmp_path.iterdir()) == []


def test_the_store_marks_itself_as_a_cache(store: Store) -> None:
    store.build("wheels", INPUTS, Made, put)
    tag = (store.root / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_an_artefact_is_made_once_and_found_again(store: Store) -> None:
    made = store.build("wheels", INPUTS, Made, put)
    found = store.build("wheels", {"b": ["x"], "a": 1}, Made, never)
    assert found == made
    assert (made.path / "file").read_text() == "content"
    assert made.key == key_of(INPUTS)
    assert Store(store.root).find("wheels", INPUTS, Made) == made


def test_other_inputs_or_another_stage_are_another_artefact(store: Store) -> None:
    one = store.build("wheels", INPUTS, Made, put)
    assert store.build("wheels", {**INPUTS, "a": 2}, Made, put).path != one.path
    assert store.build("image", INPUTS, Made, put).path != one.path


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failed_make_leaves_nothing(store: Store, error: BaseException) -> None:
    def fail(folder: Path) -> Made:
        put(folder)
        raise error

    with pytest.raises(type(error)):
        store.build("wheels", INPUTS, Made, fail)
    assert store.find("wheels", INPUTS, Made) is None
    assert list((store.root / "tmp").iterdir()) == []
    assert store.build("wheels", INPUTS, Made, put).result == Made("file")


def test_a_result_that_is_no_json_leaves_nothing(store: Store) -> None:
    with pytest.raises(ValueError, match="object"):
        store.build("wheels", INPUTS, Made, lambda folder: Made(object()))
    assert list((store.root / "tmp").iterdir()) == []
    assert not (store.root / "artefacts" / "wheels").exists()


@pytest.mark.parametrize("left", ["", '{"stage": "whe'])
def test_an_artefact_cut_off_by_a_power_failure_is_made_again(store: Store, left: str) -> None:
    made = store.build("wheels", INPUTS, Made, put)
    (made.path / "artefact.json").write_text(left)
    assert store.find("wheels", INPUTS, Made) is None
    assert store.build("wheels", INPUTS, Made, put).result == Made("file")


def test_making_again_keeps_the_old_one_until_the_new_one_stands(store: Store) -> None:
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


def test_sweep_takes_what_nobody_holds_and_leaves_what_somebody_does(store: Store) -> None:
    with store.temporary("mine") as mine:
        left = mine.with_name(f"{mine.name[:-8]}dead_123")
        others = [mine.with_name(name) for name in ("my-document", "run-20261123", "sparkforge-x")]
        for folder in (left, *others):
            (folder / "deep").mkdir(parents=True)
            (folder / "deep" / "file").write_text("x")
        assert Store(store.root).sweep() == 1
        assert mine.is_dir()
        assert not left.exists()
        assert all((folder / "deep" / "file").is_file() for folder in others)
    assert not mine.exists()


def test_sweep_outlasts_a_program_of_a_killed_run_that_still_writes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.temporary("series"):
        pass  # the store is there
    folder = store.root / "tmp" / "sparkforge-series-abcd_1x2"
    folder.mkdir()
    remove, late = shutil.rmtree, ["a", "b"]

    def remove_while_it_writes(path: Path, *, ignore_errors: bool) -> None:
        remove(path, ignore_errors=ignore_errors)
        if late:
            path.mkdir()
            (path / late.pop()).touch()

    monkeypatch.setattr(shutil, "rmtree", remove_while_it_writes)
    assert store.sweep() == 1
    assert not late
    assert not folder.exists()


def test_sweep_leaves_the_folder_of_another_process_whatever_its_number(store: Store) -> None:
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
    assert store.sweep() == 0
    assert path.is_dir()
    child.kill()
    child.communicate()
    assert path.is_dir()
    assert store.sweep() == 1
    assert not path.exists()


def test_remember_and_last(store: Store) -> None:
    assert store.last("cpu", "wheel vllm (unpatched)") is None
    made = store.build("wheels", INPUTS, Made, put)
    store.remember("cpu", "wheel vllm (unpatched)", made)
    assert store.last("cpu", "wheel vllm (unpatched)") == {"key": made.key, "inputs": INPUTS}
    note = store.root / "last/cpu/wheel vllm (unpatched).json"
    for damaged in ("{}", note.read_text().replace(made.key, "0" * 64), '{"key": 1, "inputs": 2}'):
        note.write_text(damaged)
        assert store.last("cpu", "wheel vllm (unpatched)") is None
        store.clean_superseded()
    assert [p.name for p in (store.root / "last" / "cpu").iterdir()] == [
        "wheel vllm (unpatched).json"
    ]


def test_a_note_cut_off_by_a_power_failure_counts_as_none(store: Store) -> None:
    store.remember("cpu", "image", store.build("image", INPUTS, Made, put))
    (store.root / "last" / "cpu" / "image.json").write_text('{"key"')
    assert store.last("cpu", "image") is None


def test_a_note_that_says_the_same_is_not_written_again(store: Store) -> None:
    path = store.root / "note.json"
    store.write_json(path, {"a": 1})
    os.utime(path, (1, 1))
    store.write_json(path, {"a": 1})
    assert path.stat().st_mtime == 1
    store.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}


# -- downloads ------------------------------------------------------------------


def test_an_accepted_download_is_read_only_under_its_name(store: Store) -> None:
    store.build("wheels", INPUTS, Made, put)
    partial = store.partial_path(sha256(b"data"))
    partial.write_bytes(b"data")
    final = store.accept_download(partial, sha256(b"data"), "data.whl")
    assert final == store.download_path(sha256(b"data"), "data.whl")
    assert stat.S_IMODE(final.stat().st_mode) == 0o444
    assert not partial.exists()


def test_a_download_with_another_hash_leaves_nothing(store: Store) -> None:
    store.build("wheels", INPUTS, Made, put)
    partial = store.partial_path(sha256(b"data"))
    partial.write_bytes(b"atad")
    with pytest.raises(IntegrityError, match=r"sha256 is .*, but") as caught:
        store.accept_download(partial, sha256(b"data"), "data.whl")
    assert caught.value.exit_code == 5
    assert not partial.exists()
    assert list((store.root / "downloads").iterdir()) == []


# -- cleaning ---------------------------------------------------------------------


def test_clean_takes_artefacts_and_leaves_downloads(store: Store) -> None:
    made = store.build("wheels", INPUTS, Made, put)
    kept = store.download_path(sha256(b""), "x")
    kept.parent.mkdir()
    kept.write_bytes(b"")
    assert store.clean(everything=False) > 0
    assert not made.path.exists()
    assert kept.exists()
    store.clean(everything=True)
    assert not kept.exists()
    assert store.build("wheels", INPUTS, Made, put).path.is_dir()


def test_clean_superseded_keeps_what_a_newest_build_uses(store: Store) -> None:
    old = store.build("wheels", {"n": 1}, Made, put)
    store.remember("cpu", "wheel", old)
    new = store.build("wheels", {"n": 2}, Made, put)
    store.remember("cpu", "wheel", new)
    assert store.clean_superseded() > 0
    assert not old.path.exists()
    assert new.path.is_dir()


def test_clean_leaves_another_builds_work_in_progress(store: Store) -> None:
    other = Store(store.root)
    with other.temporary("series") as work:
        store.clean(everything=True)
        assert work.is_dir()
    assert other.build("wheels", INPUTS, Made, put).path.is_dir()


@pytest.mark.parametrize("name", ["git", "tmp", "artefacts", "downloads"])
def test_what_others_have_in_a_folder_that_is_named_as_the_store_stays(
    tmp_path: Path, name: str
) -> None:
    kept = tmp_path / name / "mine" / "file"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    store = Store(tmp_path)
    assert store.sweep() == 0
    for act in (
        lambda: store.clean(everything=True),
        store.clean_superseded,
        lambda: store.build("wheels", INPUTS, Made, put),
    ):
        with pytest.raises(StoreError, match=rf"not a sparkforge store, and contains {name}"):
            act()
    assert kept.read_text() == "precious"
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_downloads_may_be_brought_before_the_store_is_made(store: Store) -> None:
    kept = store.download_path(sha256(b""), "x")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    assert store.build("wheels", INPUTS, Made, put).path.is_dir()
    assert store.verified(sha256(b""), "x")


# -- refusals ------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"the disk is full[\s\S]*--store DIR") as caught,
        disk_errors(tmp_path / "not" / "there"),
    ):
        Path("/dev/full").write_bytes(b"x" * 100_000)
    assert caught.value.exit_code == 11


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), disk_errors(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("below", ["", "below"])
def test_a_store_on_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"is not a folder[\s\S]*--store DIR"):
        Store(tmp_path / "file" / below).build("wheels", INPUTS, Made, put)


# -- digests ---------------------------------------------------------------------------


def test_keys_do_not_depend_on_the_order_of_inputs() -> None:
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": "1"})


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == sha256(b"abc")


def test_the_code_digest_follows_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    before = code_digest(one, two)
    assert code_digest(two, one) == before
    one.write_text("11")
    assert code_digest(one, two) != before
