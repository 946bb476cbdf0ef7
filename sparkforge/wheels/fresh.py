"""Wheels of our own, written from their members: the same members give the same bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from sparkforge.wheels import archive


@dataclass(frozen=True)
class Fresh:
    """A wheel to write.

    Attributes:
        name: of the distribution.
        tag: e.g. ``py3-none-any``.
        metadata: further lines of METADATA.
        entry_points: by group, then by name.
        licenses: texts by name.
    """

    name: str
    version: str
    tag: str
    metadata: Sequence[str]
    members: Mapping[str, bytes]
    entry_points: Mapping[str, Mapping[str, str]]
    licenses: Mapping[str, bytes] = field(default_factory=dict)


def write(wheel: Fresh, epoch: int, folder: Path) -> Path:
    """Write a wheel into a folder; nobody may change the file.

    Args:
        epoch: date of its members, seconds since 1970.
    """
    stem = f"{wheel.name.replace('-', '_')}-{wheel.version}"
    info = f"{stem}.dist-info"
    members = dict(wheel.members)
    members[f"{info}/METADATA"] = _lines(
        "Metadata-Version: 2.4",
        f"Name: {wheel.name}",
        f"Version: {wheel.version}",
        *wheel.metadata,
    )
    for name, text in wheel.licenses.items():
        members[f"{info}/licenses/{name}"] = text
    pure = str(wheel.tag.endswith("-any")).lower()
    members[f"{info}/WHEEL"] = _lines(
        "Wheel-Version: 1.0",
        "Generator: sparkforge",
        f"Root-Is-Purelib: {pure}",
        f"Tag: {wheel.tag}",
    )
    if wheel.entry_points:
        members[f"{info}/entry_points.txt"] = _lines(
            *(
                line
                for group, names in wheel.entry_points.items()
                for line in (f"[{group}]", *(f"{name} = {at}" for name, at in names.items()))
            )
        )
    record = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in sorted(members.items())]
    members[f"{info}/RECORD"] = _lines(*record, f"{info}/RECORD,,")
    out = folder / f"{stem}-{wheel.tag}.whl"
    with out.open("xb") as file:
        writer = archive.Writer(file, epoch)
        # metadata last, as every builder does
        for name in sorted(members, key=lambda name: (".dist-info/" in name, name)):
            writer.add(name, members[name])
        writer.finish()
    out.chmod(0o444)  # dist/ links to it: a change there must not change the store
    return out


def _lines(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
