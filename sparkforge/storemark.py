"""Is a folder a store of ours? What a store has under its names is swept and cleaned away.

Somebody may name a home or ``/`` as the store, which have a ``tmp`` or a ``git`` of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sparkforge.errors import StoreError

_NAME = "CACHEDIR.TAG"
_OURS = "# This folder is sparkforge's store"
_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    f"{_OURS}; it can be deleted, the next build fills it again.\n"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def marked(root: Path) -> bool:
    """Tell whether a folder is marked as a store."""
    try:
        return _OURS in (root / _NAME).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return False


def mark(root: Path) -> None:
    """Mark a folder as a store, and for backup programs as a cache."""
    if not marked(root):
        (root / _NAME).write_text(_TEXT)


def refuse_others(root: Path, names: tuple[str, ...]) -> None:
    """Refuse a folder in which others keep something where a store has what it removes.

    What is named by a hash may be there before the store is: downloads, brought from elsewhere.

    Args:
        names: folders of a store.

    Raises:
        StoreError: there is such a thing, and no mark.
    """
    found = next(_foreign(root, names), None)
    # the mark is looked for last: another build that makes this store sets it before it fills it
    if found is None or marked(root):
        return
    msg = f"{root}: is no store of sparkforge's, and holds {found.relative_to(root)}"
    raise StoreError(msg, "name a folder for the store alone with --store DIR")


def _foreign(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    for name in names:
        if (root / name).is_symlink():
            continue  # to another store: what is behind a link is not removed
        try:
            yield from (one for one in (root / name).iterdir() if not _SHA256.fullmatch(one.name))
        except (FileNotFoundError, NotADirectoryError):
            continue
