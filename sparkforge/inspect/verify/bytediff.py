"""Find the difference of two files that should be equal: member, offset and both values."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile, ZipInfo

_CHUNK = 1 << 20
_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """One difference."""

    where: str
    """File, and the member in it."""
    what: str
    """e.g. ``offset 0x1f2: 61 62 → 61 63``."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Bytes:
    """The first differing bytes: their offset, and up to eight of each file."""

    offset: int
    first: bytes
    second: bytes

    def __str__(self) -> str:
        return f"offset {self.offset:#x}: {_hex(self.first)} → {_hex(self.second)}"


def streams(first: IO[bytes], second: IO[bytes]) -> Bytes | None:
    """Read two streams to their first difference, or return None."""
    offset = 0
    while True:
        old, new = _read(first, _CHUNK), _read(second, _CHUNK)
        if old == new:
            if not old:
                return None
            offset += len(old)
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        old += _read(first, _SHOWN)
        new += _read(second, _SHOWN)
        return Bytes(offset + at, old[at:][:_SHOWN], new[at:][:_SHOWN])


def _read(stream: IO[bytes], size: int) -> bytes:
    """Read a number of bytes, or to the end; a stream may return less at a time."""
    pieces = []
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _hex(data: bytes) -> str:
    return data.hex(" ") or "the end"


def files(first: Path, second: Path) -> Bytes | None:
    """Compare two files like ``streams``."""
    with first.open("rb") as old, second.open("rb") as new:
        return streams(old, new)


def wheels(first: Path, second: Path) -> list[Difference]:
    """Return the differences of two wheels; an empty list: byte-identical."""
    where = second.name
    raw = files(first, second)
    named = []
    if first.name != second.name:
        named.append(Difference(where, f"name {first.name} → {second.name}"))
    if raw is None:
        return named
    result = []
    try:
        with ZipFile(first) as old, ZipFile(second) as new:
            result = _members(where, old, new)
    except BadZipFile:
        pass  # files that cannot be opened are compared as bytes below
    # the archive's own bytes if no member shows the difference: a damaged file
    return [*named, *(result or [Difference(_at(second, raw.offset), str(raw))])]


def _at(wheel: Path, offset: int) -> str:
    """Return the name of the member at a byte of the archive, if possible."""
    try:
        with ZipFile(wheel) as archive:
            before = [info for info in archive.infolist() if info.header_offset <= offset]
            if before and offset < archive.start_dir:
                last = max(before, key=lambda info: info.header_offset)
                return f"{wheel.name}: {last.filename} (packed)"
    except BadZipFile:
        pass  # only the archive can be named
    return wheel.name


def _members(where: str, first: ZipFile, second: ZipFile) -> list[Difference]:
    before = {info.filename: info for info in first.infolist()}
    after = {info.filename: info for info in second.infolist()}
    result = [Difference(f"{where}: {name}", "only in the first") for name in before.keys() - after]
    result += [
        Difference(f"{where}: {name}", "only in the second") for name in after.keys() - before
    ]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if (old.CRC, old.file_size) != (new.CRC, new.file_size):
            with first.open(old) as left, second.open(new) as right:
                found = streams(left, right)
            if found is not None:
                result.append(Difference(f"{where}: {name}", str(found)))
        result += [Difference(f"{where}: {name}", text) for text in _attributes(old, new)]
    # RECORD last: it differs because another member does
    result.sort(key=lambda difference: (difference.where.endswith("/RECORD"), difference.where))
    if not result and list(before) != list(after):
        at = next(i for i, names in enumerate(zip(before, after, strict=True)) if len({*names}) > 1)
        text = f"member {at}: {list(before)[at]} → {list(after)[at]}"
        result.append(Difference(where, text))
    return result


def _attributes(old: ZipInfo, new: ZipInfo) -> list[str]:
    """Return the differences of two members other than their content."""
    pairs = {
        "date": (_date(old), _date(new)),
        "mode": (_mode(old), _mode(new)),
        "compression": (str(old.compress_type), str(new.compress_type)),
        "extra field": (old.extra.hex(), new.extra.hex()),
    }
    result = [f"{name} {a} → {b}" for name, (a, b) in pairs.items() if a != b]
    same = (old.CRC, old.file_size) == (new.CRC, new.file_size)
    if same and old.compress_size != new.compress_size:
        result.append(f"compressed size {old.compress_size} → {new.compress_size}")
    return result


def _date(info: ZipInfo) -> str:
    return "{}-{:02}-{:02} {:02}:{:02}:{:02}".format(*info.date_time)


def _mode(info: ZipInfo) -> str:
    return stat.filemode(info.external_attr >> 16)
