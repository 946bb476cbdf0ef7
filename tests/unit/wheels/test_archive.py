"""Zip archives: what is copied keeps its compressed bytes, and equal inputs give equal files."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.core import plain
from sparkforge.core.errors import BuildError
from sparkforge.wheels import archive
from tests.support import EPOCH, make_wheel


def packed(path: Path) -> dict[str, bytes]:
    """Return each member's bytes as they lie in the file, read with the standard library alone."""
    raw = path.read_bytes()
    result = {}
    with zipfile.ZipFile(path) as wheel:
        for info in wheel.infolist():
            name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            result[info.filename] = raw[start : start + info.compress_size]
    return result


def copied(source: Path, target: Path) -> Path:
    with archive.opened(source) as wheel, target.open("wb") as file:
        writer = archive.Writer(file, EPOCH)
        for name in sorted(wheel.members):
            writer.copy(wheel, wheel.members[name], name)
        writer.finish()
    return target


FILES = {
    "demo/a.py": b"x = 1\n" * 99,
    "demo/b.bin": os.urandom(3000),
    "demo/empty": b"",
    "demo/\u00fcn\u00ef \u2603.txt": b"words",
    "demo/run": b"#!/bin/sh\n",
}


def test_another_reader_agrees(tmp_path: Path) -> None:
    target = copied(make_wheel(tmp_path, files=FILES, descriptors=True), tmp_path / "out.zip")
    out = subprocess.run(
        ["python3", "-m", "zipfile", "-t", target], capture_output=True, text=True, check=True
    ).stdout
    assert "Done testing" in out


def test_new_members_do_not_depend_on_a_compressor(tmp_path: Path) -> None:
    target = tmp_path / "out.zip"
    with target.open("wb") as file:
        writer = archive.Writer(file, EPOCH)
        writer.add("x", b"content" * 99)
        writer.add("y", b"", executable=True)
        writer.finish()
    assert packed(target) == {"x": b"content" * 99, "y": b""}
    with zipfile.ZipFile(target) as made:
        assert made.testzip() is None
        assert made.getinfo("y").external_attr >> 16 == 0o100755


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=12).filter(
            lambda name: plain.path_problem(name) is None and "/" not in name
        ),
        st.binary(max_size=2000),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    st.integers(min_value=315532800, max_value=4102444800),
)
@settings(max_examples=40)
def test_any_archive_survives_a_copy(files: dict[str, bytes], packing: int, epoch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.zip", Path(folder) / "b.zip"
        with zipfile.ZipFile(source, "w", packing) as made:
            for name, data in files.items():
                made.writestr(name, data)
        with archive.opened(source) as wheel, target.open("wb") as file:
            writer = archive.Writer(file, epoch)
            for name, info in wheel.members.items():
                writer.copy(wheel, info, name)
            writer.finish()
        with zipfile.ZipFile(target) as result:
            assert {info.filename: result.read(info) for info in result.infolist()} == files
        assert packed(target) == packed(source)


def test_a_date_before_the_formats_first_is_its_first(tmp_path: Path) -> None:
    sink = io.BytesIO()
    writer = archive.Writer(sink, 0)
    writer.add("x", b"")
    writer.finish()
    assert zipfile.ZipFile(sink).getinfo("x").date_time[0] == 1980


def test_more_than_the_format_holds_is_refused(tmp_path: Path) -> None:
    with archive.opened(make_wheel(tmp_path)) as wheel:
        info = wheel.members["demo/__init__.py"]
        info.file_size = 5 << 30
        with pytest.raises(BuildError, match="too large"):
            archive.Writer(io.BytesIO(), EPOCH).copy(wheel, info, "x")
