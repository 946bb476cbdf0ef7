"""What names differing bytes: every kind of difference of two wheels, and no false one."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkforge.inspect.verify import bytediff
from tests.support import make_wheel

FILES = {"demo/__init__.py": b"x = 1\n", "demo/big.bin": bytes(range(256)) * 8192}


def differences(first: Path, second: Path) -> list[str]:
    return [str(one) for one in bytediff.wheels(first, second)]


def rewrite(wheel: Path, folder: Path, **changes: object) -> Path:
    """Copy a wheel member by member, with changed attributes of demo/__init__.py."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename == "demo/__init__.py":
                for name, value in changes.items():
                    setattr(info, name, value)
            new.writestr(info, data)
    return folder / wheel.name


def test_the_same_wheel_differs_in_nothing(tmp_path: Path) -> None:
    one, two = make_wheel(tmp_path / "a", files=FILES), make_wheel(tmp_path / "b", files=FILES)
    assert differences(one, two) == []


def test_a_changed_byte_is_named_with_member_offset_and_both_values(tmp_path: Path) -> None:
    data = bytearray(FILES["demo/big.bin"])
    data[0x12345] ^= 0xFF
    one = make_wheel(tmp_path / "a", files=FILES)
    two = make_wheel(tmp_path / "b", files={**FILES, "demo/big.bin": bytes(data)})
    found = differences(one, two)
    assert f"{two.name}: demo/big.bin: offset 0x12345: 45 46 47 48 49 4a 4b 4c → ba 46" in found[0]
    # RECORD holds the hash of that file
    assert [line.split(": ")[1] for line in found] == ["demo/big.bin", "demo-1.0.dist-info/RECORD"]


def test_members_of_one_side_only_are_named(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "a", files={**FILES, "demo/a.py": b""})
    two = make_wheel(tmp_path / "b", files={**FILES, "demo/b.py": b""})
    found = differences(one, two)
    assert f"{one.name}: demo/a.py: only in the first" in found
    assert f"{one.name}: demo/b.py: only in the second" in found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"date_time": (2021, 1, 1, 0, 0, 0)}, "date 2020-02-02 02:02:02 → 2021-01-01 00:00:00"),
        ({"external_attr": 0o100600 << 16}, "mode -rw-rw-r-- → -rw-------"),
        ({"compress_type": zipfile.ZIP_STORED}, "compression 8 → 0"),
    ],
)
def test_attributes_of_a_member_are_named(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    one = make_wheel(tmp_path / "a", files=FILES)
    two = rewrite(one, tmp_path / "b", **changes)
    assert f"{one.name}: demo/__init__.py: {said}" in differences(one, two)


def test_another_order_of_the_same_members_is_named(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "a", files=FILES)
    (tmp_path / "b").mkdir()
    two = tmp_path / "b" / one.name
    with zipfile.ZipFile(one) as old, zipfile.ZipFile(two, "w") as new:
        for info in reversed(old.infolist()):
            new.writestr(info, old.read(info))
    assert differences(one, two) == [
        f"{one.name}: member 0: demo/__init__.py → demo-1.0.dist-info/RECORD"
    ]


def test_a_damaged_member_is_named_by_its_place_in_the_archive(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "a", files=FILES, stored=FILES)
    (tmp_path / "b").mkdir()
    two = tmp_path / "b" / one.name
    data = bytearray(one.read_bytes())
    at = data.index(b"x = 1\n")
    data[at] = ord("y")
    two.write_bytes(data)
    assert differences(one, two) == [
        f"{one.name}: demo/__init__.py (packed): offset {at:#x}: 78 20 3d 20 31 0a 50 4b →"
        " 79 20 3d 20 31 0a 50 4b"
    ]


def test_what_is_no_archive_is_compared_as_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "a.whl", tmp_path / "b.whl"
    one.write_bytes(b"same")
    two.write_bytes(b"same and more")
    assert differences(one, two) == [
        "b.whl: name a.whl → b.whl",
        "b.whl: offset 0x4: the end → 20 61 6e 64 20 6d 6f 72",
    ]


class Slow(io.BytesIO):
    """A stream that gives a byte at a time, as a pipe may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(1 if size else 0)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_the_first_difference_is_the_first(one: bytes, two: bytes) -> None:
    found = bytediff.streams(Slow(one), io.BytesIO(two))
    if one == two:
        assert found is None
        return
    assert found is not None
    at = found.offset
    assert one[:at] == two[:at]
    assert one[at : at + 1] != two[at : at + 1]
    assert (found.first, found.second) == (one[at : at + 8], two[at : at + 8])
