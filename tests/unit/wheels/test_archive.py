"""Zip archives: what is copied keeps its compressed bytes, and equal inputs give equal files."""

import struct
import tempfile
import zipfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.core import plain
from sparkforge.wheels import archive


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


def copy(source: Path, target: Path, epoch: int) -> None:
    with archive.opened(source) as wheel, archive.writing(target, epoch) as writer:
        for name, info in wheel.members.items():
            writer.copy(wheel, info, name)


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
        copy(source, target, epoch)
        with zipfile.ZipFile(target) as result:
            assert {info.filename: result.read(info) for info in result.infolist()} == files
        assert packed(target) == packed(source)


def test_new_members_depend_on_no_compressor_and_their_date_is_the_formats_first(
    tmp_path: Path,
) -> None:
    with archive.writing(tmp_path / "x.whl", 0) as writer:
        writer.add("x", b"content" * 99)
        writer.add("y", b"", executable=True)
    with zipfile.ZipFile(tmp_path / "x.whl") as made:
        assert made.testzip() is None
        assert {info.filename: made.read(info) for info in made.infolist()} == {
            "x": b"content" * 99,
            "y": b"",
        }
        assert {info.compress_type for info in made.infolist()} == {zipfile.ZIP_STORED}
        assert made.getinfo("x").date_time[0] == 1980
        assert made.getinfo("y").external_attr >> 16 == 0o100755
