"""Files that appear complete or not at all, whoever is killed meanwhile."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from sparkforge.core.disk import write_file
from tests.support import python, wait_for

SLOW = """
import os, sys, time
from pathlib import Path
from sparkforge.core.disk import write_file
def hang(handle):
    Path(sys.argv[2]).touch()
    time.sleep(600)
os.fsync = hang
write_file(Path(sys.argv[1]), b"never")
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_killed_writer_leaves_nothing_behind_the_next_one(tmp_path: Path) -> None:
    path, note = tmp_path / "files" / "receipt.json", tmp_path / "note"
    path.parent.mkdir()
    path.write_bytes(b"old")
    for _ in range(2):
        child = python(SLOW, path, note)
        wait_for(note.exists)
        child.kill()
        child.communicate()
        note.unlink()
        assert path.read_bytes() == b"old"
    assert len(names(path.parent)) == 2  # one temporary file, however many were killed
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(path.parent) == {"receipt.json"}


def test_writers_at_once_give_one_of_their_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contents = [bytes([65 + at]) * 50_000 for at in range(8)]
    threads = [threading.Thread(target=write_file, args=(path, one)) for one in contents * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert names(tmp_path) == {"a"}


def test_a_file_keeps_its_mode_and_a_link_in_its_way_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "other"
    write_file(path, b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    write_file(path, b"2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other.write_bytes(b"precious")
    (tmp_path / ".a.new").symlink_to(other)
    with pytest.raises(OSError, match="symbolic link"):
        write_file(path, b"3")
    assert (other.read_bytes(), path.read_bytes()) == (b"precious", b"2")


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no"):
        write_file(tmp_path / "a", b"1")
    assert names(tmp_path) == set()
