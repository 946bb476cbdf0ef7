"""Files appear complete or not at all; a file is read once in a run, and a change is seen."""

import errno
import os
import stat
from pathlib import Path

import pytest

from sparkforge.core import disk
from sparkforge.core.disk import intact, write_file, write_files
from sparkforge.core.errors import StoreError
from tests.support import sha256


def test_write_replaces_a_file_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a"
    write_file(path, b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    write_file(path, b"2")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"2", 0o600)
    assert [one.name for one in path.parent.iterdir()] == ["a"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "a", b"1")

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError):
        write_file(tmp_path / "a", b"2")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"1")]


def test_files_are_replaced_and_removed(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"1")
    write_files({tmp_path / "a": None, tmp_path / "new" / "b": b"2"})
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "new" / "b").read_bytes() == b"2"


def test_a_file_is_read_once_and_a_change_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    whole = disk.sha256_file

    def counted(path: Path) -> str:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(disk, "sha256_file", counted)
    one, other = tmp_path / "store.whl", tmp_path / "dist.whl"
    one.write_bytes(b"wheel")
    other.hardlink_to(one)
    right = sha256(b"wheel")
    assert intact(one, right) and intact(other, right) and not intact(tmp_path / "none", right)
    assert read == [one]
    one.write_bytes(b"Wheel.")  # both names are of this file
    assert not intact(other, right)
