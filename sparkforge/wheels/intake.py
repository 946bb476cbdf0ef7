"""Check a release wheel and read its metadata, before it is used.

Wheels that pip, uv and ``wheel`` all accept are accepted. Others are refused here with one error,
not later by the users of our wheel.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from sparkforge.core import plain
from sparkforge.core.errors import BuildError
from sparkforge.store.store import Store, code_of
from sparkforge.wheels import archive

_INFO = ".dist-info"
_DIGESTS = ("sha256", "sha384", "sha512")
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")


@dataclass(frozen=True)
class Field:
    """A header of METADATA or WHEEL: key in lower case, value, and the text as written."""

    key: str
    value: str
    text: str


@dataclass(frozen=True)
class Wheel:
    """A wheel's metadata.

    ``stem`` is NAME-VERSION as its ``.dist-info`` folder spells it, ``released`` the version in the
    file's name, ``tags`` its PYTHON-ABI-PLATFORM; ``record`` has digests as ``sha256=…``.
    """

    stem: str
    name: str
    version: str
    released: str
    tags: str
    metadata: tuple[Field, ...]
    description: str
    wheel: tuple[Field, ...]
    record: Mapping[str, str]

    @property
    def info(self) -> str:
        """Its ``.dist-info`` folder."""
        return f"{self.stem}{_INFO}"


@dataclass(frozen=True)
class IntakeResult:
    """A wheel that was checked: the number of its members."""

    members: int


def take(store: Store, path: Path, sha256: str) -> None:
    """Check every byte of a download, once for each store; BuildError: no installer takes it."""

    def check(folder: Path) -> IntakeResult:
        with archive.opened(path) as source:
            return IntakeResult(verify(source))

    store.build("intake", {"wheel": sha256, "code": code_of(__name__)}, IntakeResult, check)


def verify(source: archive.Source) -> int:
    """Check every member of a wheel with its RECORD; returns their number."""
    wheel = read(source)
    unsigned = {f"{wheel.info}/{name}" for name in _UNSIGNED}
    for member in source.members:
        if member not in wheel.record and member not in unsigned:
            raise source.wrong(f"{member} has no hash in its RECORD")
        for _ in checked(source, wheel.record, member):
            pass  # members without a hash have a check sum
    return len(source.members)


def checked(source: archive.Source, record: Mapping[str, str], member: str) -> Iterator[bytes]:
    """Yield a member's content; BuildError after it if it differs from its hash in RECORD."""
    algorithm, _, wanted = record.get(member, "sha256=").partition("=")
    digest = hashlib.new(algorithm)
    for piece in source.content(member):
        digest.update(piece)
        yield piece
    found = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if wanted and wanted.rstrip("=") != found:
        raise source.wrong(f"{member} differs from its RECORD")


def read(source: archive.Source) -> Wheel:
    """Read a wheel's metadata.

    BuildError: its file name, METADATA, WHEEL or RECORD are invalid, or disagree.
    """
    parts = source.path.name.removesuffix(".whl").split("-")
    if len(parts) != 5 or plain.path_problem(source.path.name):
        msg = f"{source.path.name}: not named NAME-VERSION-PYTHON-ABI-PLATFORM.whl"
        raise BuildError(msg, "pin the file under its upstream name")
    stem = _stem(source, parts[0], parts[1])
    headers, description = _parsed(source, f"{stem}{_INFO}/METADATA")
    name, version = (_only(source, headers, key) for key in ("name", "version"))
    try:
        same = canonicalize_name(name, validate=True) == canonicalize_name(parts[0])
        same = same and Version(version) == Version(parts[1])
        for field in headers:
            if field.key == "requires-dist":
                Requirement(field.value)
    except (InvalidName, InvalidVersion, InvalidRequirement) as error:
        raise source.wrong(f"METADATA: {error}") from None
    if not same:
        raise source.wrong(f"METADATA is of {name} {version}")
    wheel, _ = _parsed(source, f"{stem}{_INFO}/WHEEL")
    if not re.fullmatch(r"1\.[0-9]+", _only(source, wheel, "wheel-version")):
        raise source.wrong("WHEEL: Wheel-Version is not 1.x")
    return Wheel(
        stem=stem,
        name=name,
        version=version,
        released=parts[1],
        tags="-".join(parts[2:]),
        metadata=headers,
        description=description,
        wheel=wheel,
        record=_record(source, f"{stem}{_INFO}/RECORD"),
    )


def _stem(source: archive.Source, name: str, version: str) -> str:
    """Return NAME-VERSION in the spelling of the wheel's one ``.dist-info`` folder."""
    tops = {member.partition("/")[0] for member in source.members if "/" in member}
    stems = [top.removesuffix(_INFO) for top in tops if top.endswith(_INFO)]
    spelt, _, numbered = stems[0].rpartition("-") if len(stems) == 1 else ("", "", "")
    if (canonicalize_name(spelt), numbered) != (canonicalize_name(name), version):
        raise source.wrong(f"has no single folder {name}-{version}{_INFO}")
    return stems[0]


def _text(source: archive.Source, member: str) -> str:
    if member not in source.members:
        raise source.wrong(f"has no {member}")
    try:
        text = source.read(member).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        text = "\ufeff"
    if text.startswith("\ufeff"):
        raise source.wrong(f"{member} is not UTF-8 text, or starts with a byte order mark")
    return text


def _parsed(source: archive.Source, member: str) -> tuple[tuple[Field, ...], str]:
    """Return the headers of a file in mail format, and the text after the first empty line."""
    head, _, body = _text(source, member).partition("\n\n")
    fields = []
    for text in re.split(r"\n(?![ \t])", head.strip("\n")):
        key, colon, value = text.partition(":")
        # a line that is not a header stays: a licence's text without indent
        fields.append(Field(key.lower() if colon else "", value.strip(), text))
    return tuple(fields), body


def _only(source: archive.Source, fields: Sequence[Field], key: str) -> str:
    values = [field.value for field in fields if field.key == key]
    if len(values) != 1 or not values[0]:
        raise source.wrong(f"states {key.title()} {len(values)} times instead of once")
    return values[0]


def _record(source: archive.Source, member: str) -> dict[str, str]:
    """Return the digests that RECORD has, by member."""
    found: dict[str, str] = {}
    seen = set()
    try:
        rows = csv.reader(io.StringIO(_text(source, member)), strict=True)
        for name, digest, _ in filter(None, rows):
            if name in seen or (digest and digest.partition("=")[0] not in _DIGESTS):
                raise source.wrong(f"RECORD lists {name} twice, or with an unknown digest")
            seen.add(name)
            if digest:
                found[name] = digest
    except (csv.Error, ValueError) as error:  # also a line of other than three columns
        raise source.wrong(f"cannot read RECORD: {error}") from None
    return found
