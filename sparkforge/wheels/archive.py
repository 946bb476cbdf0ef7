"""Write zip archives member by member, and copy the compressed bytes of unchanged members.

The standard library can only copy a member by unpacking and packing it. That takes minutes for a
wheel of 300 MB, and gives other bytes with another zlib. Dates, modes and order are fixed, so equal
inputs give equal archives.
"""

from __future__ import annotations

import itertools
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from sparkforge.core import plain
from sparkforge.core.errors import BuildError

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_UTF8_NAME = 0x800
_UNIX = 3
_VERSION_NEEDED = 20  # deflate and folders, which every reader supports
_LIMIT = 0xFFFFFFFF  # beyond it the archive needs zip64; our wheels are far smaller
_PIECE = 1 << 20
_ENCRYPTED = 0x1
_DESCRIPTOR = 0x8
_ZIP64 = 0xFFFFFFFF
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    RuntimeError,
    ValueError,
    OverflowError,
)
"""The standard library's errors for files that are not archives, damaged, or packed in unknown
ways."""


@dataclass(frozen=True)
class _Entry:
    name: str
    method: int
    crc: int
    packed: int
    size: int
    mode: int
    offset: int


class Source:
    """A wheel whose members are copied; keeps the file open.

    It accepts only archives that all readers of wheels interpret alike: each name is a plain path,
    unique and equal in both of its headers; no member is a folder of another, encrypted, or packed
    other than by deflate.

    Raises:
        BuildError: it is not such an archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._zip = zipfile.ZipFile(self._file)
            infos = self._zip.infolist()
            self.members = {i.filename: i for i in infos if not i.filename.endswith("/")}
            self._check()
        except BuildError:
            self._file.close()
            raise
        except (*UNREADABLE, OSError) as error:  # seeks to an invalid position
            self._file.close()
            raise self.wrong(f"not a readable wheel: {error}") from error

    def wrong(self, what: str) -> BuildError:
        """Return the error for a problem of this wheel."""
        remedy = "use the unmodified upstream file; check pins.yaml"
        return BuildError(f"{self.path.name}: {plain.escaped(what)}", remedy)

    def _check(self) -> None:
        files: set[str] = set()
        folders: set[str] = set()
        end = 0
        for info in sorted(self._zip.infolist(), key=lambda info: info.header_offset):
            # as written: zipfile cuts names at a NUL
            name = info.orig_filename.removesuffix("/")
            if problem := plain.path_problem(name):
                raise self.wrong(f"the name of a member {problem}: {name[:99]!r}")
            if info.filename.endswith("/"):
                folders.add(name)
            elif name in files:
                raise self.wrong(f"{name} occurs twice")
            else:
                files.add(name)
            folders.update(str(parent) for parent in PurePosixPath(name).parents)
            if info.flag_bits & _ENCRYPTED:
                raise self.wrong(f"{name} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise self.wrong(
                    f"{name} uses compression method {info.compress_type}, not deflate"
                )
            if info.header_offset < end:
                raise self.wrong(f"{name} overlaps another member")
            end = self._checked_header(info) + info.compress_size
        for name in sorted(files & folders):
            raise self.wrong(f"{name} is both a file and a folder")

    def _checked_header(self, info: zipfile.ZipInfo) -> int:
        """Return the position of a member's bytes; its two headers must agree."""
        self._file.seek(info.header_offset)
        fields = _LOCAL.unpack(self._file.read(_LOCAL.size))
        flags, method = fields[2:4]
        crc, packed, size = fields[6:9]
        name = self._file.read(fields[9]).decode(
            "utf-8" if info.flag_bits & _UTF8_NAME else "cp437"
        )
        behind = flags & _DESCRIPTOR or _ZIP64 in (packed, size)  # the sizes are elsewhere
        if (fields[0], name, method) != (b"PK\3\4", info.orig_filename, info.compress_type) or (
            not behind and (crc, packed, size) != (info.CRC, info.compress_size, info.file_size)
        ):
            raise self.wrong(f"{info.filename}: its two headers differ")
        return info.header_offset + _LOCAL.size + int(fields[9]) + int(fields[10])

    def read(self, name: str) -> bytes:
        """Return a member's content; BuildError if it is missing or damaged."""
        if name not in self.members:
            raise BuildError(f"{self.path.name}: has no {name}", "fix pins.yaml")
        return b"".join(self.content(name))

    def content(self, name: str) -> Iterator[bytes]:
        """Yield a member's content in pieces, and check its check sum.

        Raises:
            BuildError: it is damaged.
        """
        try:
            with self._zip.open(self.members[name]) as file:
                while piece := file.read(_PIECE):
                    yield piece
        except UNREADABLE as error:
            raise self.wrong(f"{name}: {error or 'truncated'}") from error

    def packed(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield a member's bytes as stored in the archive, compressed or not, in pieces."""
        self._file.seek(self._checked_header(info))
        left = info.compress_size
        while left:
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise self.wrong(f"ends inside {info.filename}")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        self._zip.close()
        self._file.close()


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open a wheel for copying."""
    source = Source(path)
    try:
        yield source
    finally:
        source.close()


class Writer:
    """Writer of an archive; members in the order in which they are added, all with one date.

    Args:
        file: an empty binary file, open for writing.
        epoch: date of every member, seconds since 1970; the format begins in 1980.
    """

    def __init__(self, file: IO[bytes], epoch: int) -> None:
        self._file = file
        self._offset = 0
        self._entries: list[_Entry] = []
        year, month, day, hour, minute, second = time.gmtime(epoch)[:6]
        self._date = (max(year, 1980) - 1980) << 9 | month << 5 | day
        self._time = hour << 11 | minute << 5 | second // 2

    def copy(self, source: Source, info: zipfile.ZipInfo, name: str) -> None:
        """Add a member of another archive under a name, with its bytes unchanged."""
        self._add(
            name,
            source.packed(info),
            info.compress_size,
            info.compress_type,
            info.CRC,
            info.file_size,
            _mode(info.external_attr >> 16),
        )

    def add(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """Add new content uncompressed: compressed, it would differ with another zlib."""
        mode = 0o755 if executable else 0o644
        self._add(name, [data], len(data), zipfile.ZIP_STORED, zlib.crc32(data), len(data), mode)

    def _add(
        self,
        name: str,
        pieces: Iterable[bytes],
        packed: int,
        method: int,
        crc: int,
        size: int,
        mode: int,
    ) -> None:
        if self._offset + max(packed, size) > _LIMIT:
            raise BuildError("the wheel would exceed 4 GiB, the limit of its format")
        raw = name.encode()
        flags = 0 if raw.isascii() else _UTF8_NAME
        entry = _Entry(name, method, crc, packed, size, mode, self._offset)
        header = _LOCAL.pack(
            *(b"PK\3\4", _VERSION_NEEDED, flags, method, self._time, self._date),
            *(crc, packed, size, len(raw), 0),
        )
        for part in itertools.chain((header, raw), pieces):
            self._file.write(part)
            self._offset += len(part)
        self._entries.append(entry)

    def finish(self) -> None:
        """Write the directory, which completes the archive."""
        start = self._offset
        size = 0
        for entry in self._entries:
            raw = entry.name.encode()
            flags = 0 if raw.isascii() else _UTF8_NAME
            record = _CENTRAL.pack(
                *(b"PK\1\2", _UNIX << 8 | _VERSION_NEEDED, _VERSION_NEEDED, flags, entry.method),
                *(self._time, self._date, entry.crc, entry.packed, entry.size, len(raw)),
                *(0, 0, 0, 0, (stat.S_IFREG | entry.mode) << 16, entry.offset),
            )
            self._file.write(record + raw)
            size += len(record) + len(raw)
        count = len(self._entries)
        if count >= 0xFFFF or start + size > _LIMIT:
            raise BuildError("the wheel has too many files for its format")
        self._file.write(_END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0))


def _mode(mode: int) -> int:
    """Return one of two modes, so that the umask of the release's build has no effect."""
    return 0o755 if mode & stat.S_IXUSR else 0o644
