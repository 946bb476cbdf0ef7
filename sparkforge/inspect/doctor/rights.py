"""Rights of user 10001, the container's user, in a folder of this machine.

The container enters a mounted folder directly, so the folders above it do not matter. Access
control lists (setfacl) are read from their extended attribute.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparkforge.inspect.doctor.checkpoint import folder_of

USER = 10001
"""User and group of the image (Dockerfile)."""
_MOST_FILES = 10_000
# of linux/posix_acl_xattr.h and posix_acl.h: entries of other users than the owner
_ACL, _HEAD, _ENTRY = "system.posix_acl_access", 4, struct.Struct("<HHI")
_NAMED_USER, _OWNING_GROUP, _NAMED_GROUP, _MASK = 2, 4, 8, 16
_READ, _WRITE, _ENTER = 4, 2, 1


@dataclass(frozen=True)
class Rights:
    """Rights that user 10001 lacks for a model in a hub's home."""

    exists: bool = False
    """The home itself."""
    unreadable: str = ""
    unwritable: str = ""
    """``unreadable``, ``unwritable``: the first such path, or ""."""


def granted(path: Path, user: int = USER) -> int:
    """Return the rights of a user, whose group has the same number: bits 4 (read), 2, 1.

    Raises:
        OSError: it cannot be read.
    """
    seen = path.stat()
    if seen.st_uid == user:
        return seen.st_mode >> 6 & 7
    try:
        acl = os.getxattr(path, _ACL)[_HEAD:]
    except OSError:  # has none, or the file system does not support them
        return (seen.st_mode >> 3 if seen.st_gid == user else seen.st_mode) & 7
    entries = list(_ENTRY.iter_unpack(acl))
    mask = next((bits for tag, bits, _ in entries if tag == _MASK), 7)
    for tag, bits, of in entries:
        if tag == _NAMED_USER and of == user:
            return int(bits & mask)
    groups = [
        bits & mask
        for tag, bits, of in entries
        if (tag == _OWNING_GROUP and seen.st_gid == user) or (tag == _NAMED_GROUP and of == user)
    ]
    return max(groups) if groups else seen.st_mode & 7


def read(home: Path, repository: str) -> Rights:
    """Return the rights that user 10001 lacks for a model in a hub's home."""
    if not home.exists():
        return Rights()
    unreadable = unwritable = ""
    for path in _paths(home, folder_of(home / "hub", repository)):
        try:
            rights, folder = granted(path), path.is_dir()
        except OSError:
            rights, folder = 0, False
        need = _READ | _ENTER if folder else _READ
        if rights & need != need and not unreadable:
            unreadable = str(path)
        # files are replaced, not changed; complete ones are only read
        if folder and not rights & _WRITE and not unwritable:
            unwritable = str(path)
    return Rights(exists=True, unreadable=unreadable, unwritable=unwritable)


def _paths(home: Path, model: Path) -> Iterator[Path]:
    yield home
    yield from (
        path for path in (home / "hub", home / "hub" / ".locks", home / "xet") if path.exists()
    )
    if model.exists():
        yield model
        for count, path in enumerate(sorted(model.rglob("*"))):
            if count == _MOST_FILES:
                return
            yield path
