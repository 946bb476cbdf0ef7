"""Files appear complete or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sparkforge.core.disk import write_file


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
        raise OSError("no")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no"):
        write_file(tmp_path / "a", b"2")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"1")]
