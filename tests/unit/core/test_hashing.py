"""A file is read once in a run, under whatever name; a change is seen."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sparkforge.core import hashing


def test_a_file_is_read_once_under_all_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    whole = hashing.sha256_file

    def counted(path: Path) -> str:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(hashing, "sha256_file", counted)
    one, other = tmp_path / "store.whl", tmp_path / "dist.whl"
    one.write_bytes(b"wheel")
    other.hardlink_to(one)
    right = hashlib.sha256(b"wheel").hexdigest()
    assert hashing.intact(one, right)
    assert hashing.intact(other, right)
    assert not hashing.intact(other, "0" * 64)
    assert read == [one]
    one.write_bytes(b"Wheel.")  # both names are of this file
    assert not hashing.intact(other, right)
    other.unlink()
    other.write_bytes(b"wheel")  # another file with the same bytes
    assert hashing.intact(other, right)
    assert read == [one, other, other]
    assert not hashing.intact(tmp_path / "none", right)
