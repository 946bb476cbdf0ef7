"""Check a release wheel and read its metadata, before it is used.

Wheels that pip, uv and ``wheel`` all accept are accepted. Others are refused here with one error,
not later by the users of our wheel.
"""

import csv
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sparkforge.core import plain
from sparkforge.core.errors import BuildError
from sparkforge.store.store import Store, code_of
from sparkforge.wheels import archive

_INFO = ".dist-info"


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
    file's name, ``tags`` its PYTHON-ABI-PLATFORM; ``record`` has sha256s in hex, or "".
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
    """A wheel that was checked."""

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
    unsigned = {f"{wheel.info}/RECORD{ending}" for ending in ("", ".jws", ".p7s")}
    for member in source.members:
        if not wheel.record.get(member) and member not in unsigned:
            raise source.wrong(f"{member} has no hash in its RECORD")
        for _ in checked(source, wheel.record, member):
            pass  # members without a hash have a check sum
    return len(source.members)


def checked(source: archive.Source, record: Mapping[str, str], member: str) -> Iterator[bytes]:
    """Yield a member's content; BuildError after it if it differs from its hash in RECORD."""
    digest = hashlib.sha256()
    for piece in source.content(member):
        digest.update(piece)
        yield piece
    if record.get(member) not in (None, "", digest.hexdigest()):
        raise source.wrong(f"{member} differs from its RECORD")


def read(source: archive.Source) -> Wheel:
    """Read a wheel's metadata; BuildError: METADATA, WHEEL, RECORD or its name are invalid."""
    parts = source.path.name.removesuffix(".whl").split("-")
    if len(parts) != 5 or plain.path_problem(source.path.name):
        msg = f"{source.path.name}: not named NAME-VERSION-PYTHON-ABI-PLATFORM.whl"
        raise BuildError(msg, "pin the file under its upstream name")
    tops = {member.partition("/")[0] for member in source.members if "/" in member}
    stems = [top.removesuffix(_INFO) for top in tops if top.endswith(_INFO)]
    if len(stems) != 1:
        raise source.wrong(f"has no single folder NAME-VERSION{_INFO}")
    (stem,) = stems
    try:
        headers, description = _parsed(source.read(f"{stem}{_INFO}/METADATA"))
        wheel, _ = _parsed(source.read(f"{stem}{_INFO}/WHEEL"))
        record = plain.record_rows(source.read(f"{stem}{_INFO}/RECORD"))
        (name,) = (field.value for field in headers if field.key == "name")
        (version,) = (field.value for field in headers if field.key == "version")
        same = canonicalize_name(name, validate=True) == canonicalize_name(parts[0])
        if not same or Version(version) != Version(parts[1]):
            raise ValueError(f"METADATA is of {name} {version}")
        for field in (one for one in headers if one.key == "requires-dist"):
            Requirement(field.value)
    except (ValueError, csv.Error) as error:  # packaging's errors are ValueErrors
        raise source.wrong(f"invalid metadata: {error}") from None
    released, tags = parts[1], "-".join(parts[2:])
    return Wheel(stem, name, version, released, tags, headers, description, wheel, record)


def _parsed(data: bytes) -> tuple[tuple[Field, ...], str]:
    """Return the headers of a file in mail format, and the text after the first empty line."""
    head, _, body = data.decode().replace("\r\n", "\n").partition("\n\n")
    fields = []
    for text in re.split(r"\n(?![ \t])", head.strip("\n")):
        key, colon, value = text.partition(":")
        # a line that is not a header stays: a licence's text without indent
        fields.append(Field(key.lower() if colon else "", value.strip(), text))
    return tuple(fields), body
