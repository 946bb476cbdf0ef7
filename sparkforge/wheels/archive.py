"""Wheels as zip archives: members are copied as they are packed, or written; never packed again.

The standard library can only copy a member by unpacking and packing it. That takes minutes for a
wheel of 300 MB, and gives other bytes with another zlib. Dates, modes and order are fixed, so equal
inputs give equal archives.
"""

import base64
import hashlib
import stat
import struct
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sparkforge.core import plain
from sparkforge.core.errors import BuildError
from sparkforge.sources.sources import UNREADABLE

_LOCAL = struct.Struct("<4s5H3L2H")  # the header in front of a member
_UTF8_NAME, _DESCRIPTOR, _ENCRYPTED = 0x800, 0x8, 0x1  # flags of a member
_ZIP64 = 0xFFFFFFFF
_PIECE = 1 << 20


class Source:
    """A wheel whose members are copied, as an open file.

    BuildError: not all readers of wheels interpret it alike. Each name is a plain path, unique and
    equal in both of its headers; no member is encrypted, or packed other than by deflate.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        try:
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
            self.members = {i.filename: i for i in infos if not i.filename.endswith("/")}
            self._check()
        except (*UNREADABLE, OSError) as error:  # seeks to an invalid position
            raise self.wrong(f"not a readable wheel: {error}") from error

    def wrong(self, what: str) -> BuildError:
        """Return the error for a problem of this wheel."""
        remedy = "use the unmodified upstream file; check pins.yaml"
        return BuildError(f"{self.path.name}: {plain.escaped(what)}", remedy)

    def _check(self) -> None:
        names: set[str] = set()
        end = 0
        for info in sorted(self._zip.infolist(), key=lambda info: info.header_offset):
            # as written: zipfile cuts names at a NUL
            name = info.orig_filename.removesuffix("/")
            if problem := plain.path_problem(name):
                raise self.wrong(f"the name of a member {problem}: {name[:99]!r}")
            if name in names:
                raise self.wrong(f"{name} occurs twice")
            names.add(name)
            packing = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if info.flag_bits & _ENCRYPTED or info.compress_type not in packing:
                raise self.wrong(f"{name} is encrypted, or packed other than by deflate")
            start = self._start(info)
            if info.header_offset < end:
                raise self.wrong(f"{name} overlaps another member")
            end = start + info.compress_size

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Return the position of a member's bytes; its two headers must agree."""
        self._file.seek(info.header_offset)
        fields = _LOCAL.unpack(self._file.read(_LOCAL.size))
        encoding = "utf-8" if info.flag_bits & _UTF8_NAME else "cp437"
        name = self._file.read(fields[9]).decode(encoding)
        sizes = fields[6:9]
        # else the sizes are behind the data, or in the zip64 extension
        here = not fields[2] & _DESCRIPTOR and _ZIP64 not in sizes[1:]
        if (fields[0], name, fields[3]) != (b"PK\3\4", info.orig_filename, info.compress_type) or (
            here and sizes != (info.CRC, info.compress_size, info.file_size)
        ):
            raise self.wrong(f"{info.filename}: its two headers differ")
        return info.header_offset + _LOCAL.size + int(fields[9]) + int(fields[10])

    def read(self, name: str) -> bytes:
        """Return a member's content; BuildError if it is missing or damaged."""
        if name not in self.members:
            raise BuildError(f"{self.path.name}: has no {name}", "fix pins.yaml")
        return b"".join(self.content(name))

    def content(self, name: str) -> Iterator[bytes]:
        """Yield a member's content in pieces; BuildError if its check sum differs."""
        try:
            with self._zip.open(self.members[name]) as file:
                while piece := file.read(_PIECE):
                    yield piece
        except UNREADABLE as error:
            raise self.wrong(f"{name}: {error or 'truncated'}") from error

    def packed(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Yield a member's bytes as stored in the archive, compressed or not, in pieces."""
        self._file.seek(self._start(info))
        left = info.compress_size
        while left:
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise self.wrong(f"ends inside {info.filename}")
            left -= len(piece)
            yield piece


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Open a wheel for copying."""
    with path.open("rb") as file:
        yield Source(path, file)


class Writer:
    """Writer of an archive; all members have one date (seconds since 1970)."""

    def __init__(self, made: zipfile.ZipFile, epoch: int) -> None:
        self._zip = made
        self._date = time.gmtime(max(epoch, 315532800))[:6]

    def copy(self, source: Source, info: zipfile.ZipInfo, name: str) -> None:
        """Add a member of another archive under a name, with its bytes unchanged."""
        entry = self._entry(name, bool(info.external_attr >> 16 & stat.S_IXUSR))
        entry.compress_type, entry.CRC = info.compress_type, info.CRC
        entry.compress_size, entry.file_size = info.compress_size, info.file_size
        file = self._zip.fp
        assert file is not None
        entry.header_offset = file.tell()
        file.write(entry.FileHeader(zip64=False))
        file.writelines(source.packed(info))
        self._zip.filelist.append(entry)
        self._zip.start_dir = file.tell()

    def add(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """Add new content uncompressed: compressed, it would differ with another zlib."""
        self._zip.writestr(self._entry(name, executable), data)

    def _entry(self, name: str, executable: bool) -> zipfile.ZipInfo:
        entry = zipfile.ZipInfo(name, self._date)
        # one of two modes, so that the umask of the release's build has no effect
        entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
        entry.create_system = 3  # Unix
        return entry


@contextmanager
def writing(path: Path, epoch: int) -> Iterator[Writer]:
    """Write an archive; BuildError: it is too large."""
    try:
        # without zip64, which not every reader of wheels knows; ours are far smaller
        with zipfile.ZipFile(path, "w", allowZip64=False) as made:
            yield Writer(made, epoch)
    except zipfile.LargeZipFile as error:
        raise BuildError(f"{path.name}: too large for the format of wheels: {error}") from None


def stated(sha256: str) -> str:
    """Return a sha256 as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


def record_row(name: str, data: bytes) -> tuple[str, str, str]:
    """Return a member's row in RECORD."""
    return name, stated(hashlib.sha256(data).hexdigest()), str(len(data))


@dataclass(frozen=True)
class Fresh:
    """A wheel of our own; ``metadata``: further lines, ``entry_points``: by group, then by name."""

    name: str
    version: str
    tag: str
    metadata: Sequence[str]
    members: Mapping[str, bytes]
    entry_points: Mapping[str, Mapping[str, str]]
    licenses: Mapping[str, bytes] = field(default_factory=dict)


def write_fresh(wheel: Fresh, epoch: int, folder: Path) -> Path:
    """Write a wheel of our own into a folder: the same members give the same bytes."""
    stem = f"{wheel.name.replace('-', '_')}-{wheel.version}"
    info = f"{stem}.dist-info"
    about = ("Metadata-Version: 2.4", f"Name: {wheel.name}", f"Version: {wheel.version}")
    pure = str(wheel.tag.endswith("-any")).lower()
    members = {
        **wheel.members,
        f"{info}/METADATA": _lines(*about, *wheel.metadata),
        f"{info}/WHEEL": _lines(
            *("Wheel-Version: 1.0", "Generator: sparkforge"),
            *(f"Root-Is-Purelib: {pure}", f"Tag: {wheel.tag}"),
        ),
        **{f"{info}/licenses/{name}": text for name, text in wheel.licenses.items()},
    }
    points: list[str] = []
    for group, names in wheel.entry_points.items():
        points += [f"[{group}]", *(f"{name} = {at}" for name, at in names.items())]
    if points:
        members[f"{info}/entry_points.txt"] = _lines(*points)
    record = [",".join(record_row(*member)) for member in sorted(members.items())]
    members[f"{info}/RECORD"] = _lines(*record, f"{info}/RECORD,,")
    out = folder / f"{stem}-{wheel.tag}.whl"
    with writing(out, epoch) as writer:
        # metadata last, as every builder does
        for name in sorted(members, key=lambda name: (".dist-info/" in name, name)):
            writer.add(name, members[name])
    out.chmod(0o444)  # dist/ links to it: a change there must not change the store
    return out


def _lines(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
