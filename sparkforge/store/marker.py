"""The mark of a store: only a new or empty folder becomes one.

A user may name a home or ``/`` as the store, with a ``tmp`` or ``git`` of its own. A store's
folders of these names are cleaned, and backups skip a marked folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sparkforge.core.disk import write_file
from sparkforge.core.errors import StoreError

_NAME = "CACHEDIR.TAG"
_OURS = "# This folder is sparkforge's store"
_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    f"{_OURS}; it can be deleted, the next build fills it again.\n"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BROUGHT = ("downloads", "partial")


def marked(root: Path) -> bool:
    """Return whether a folder is marked as a store."""
    try:
        return _OURS in (root / _NAME).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return False


def mark(root: Path) -> None:
    """Mark a folder as a store, and for backup programs as a cache; the tag is never half written.

    Raises:
        OSError: the folder cannot be made or written.
    """
    if not marked(root):
        write_file(root / _NAME, _TEXT.encode())


def refuse_others(root: Path) -> None:
    """Refuse a folder that is not a store and is not empty.

    Folders named by a hash are allowed: downloads copied from elsewhere.

    Raises:
        StoreError: it has other contents, and no mark.
    """
    found = next(_foreign(root), None)
    # look for the mark last: another build that makes this store sets it before it fills it
    if found is None or marked(root):
        return
    msg = f"{root}: is not a sparkforge store, and contains {found.relative_to(root)}"
    raise StoreError(msg, "give an empty or new folder with --store DIR")


def _foreign(root: Path) -> Iterator[Path]:
    for path in _entries(root):
        if path.name.startswith(f".{_NAME}"):
            continue  # another build is making this store
        if path.name == "lost+found" and not any(_entries(path)):
            continue  # the root of a fresh file system
        inside = list(_entries(path)) if path.name in _BROUGHT and not path.is_symlink() else [path]
        yield from (entry for entry in inside if not _SHA256.fullmatch(entry.name))


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
