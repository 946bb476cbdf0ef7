"""The code that makes items, as a part of their keys: one digest of the packages of the build.

A changed line in any of them makes every item again. Code that only judges a build, changes the
series or runs in the image is not among them; the image's key has its own files.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_BUILD = (
    *("core", "store", "pins", "sources", "series", "wheels"),
    *("runtime", "checkpoints", "build"),
)


def code_of(module: str) -> str:
    """Return the digest of the code behind a module's items.

    Args:
        module: its full name. Of a module outside of the build, its folder counts as well.
    """
    folder = module.split(".")[1:-1]
    return (
        _digest(*_BUILD)
        if not folder or folder[0] in _BUILD
        else _digest(*_BUILD, "/".join(folder))
    )


@cache
def _digest(*folders: str) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                name = path.relative_to(_ROOT).as_posix()
                digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
