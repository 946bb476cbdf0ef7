"""Sizes of the locked files, for plans, progress, and as a limit of downloads.

A lock has hashes and no sizes, and not every index gives them. ``requirements/sizes.txt`` records
them; ``scripts/sizes.py`` writes it from the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from sparkforge.core.errors import PinsError
from sparkforge.core.log import log

FILE = "requirements/sizes.txt"
_LINE = re.compile(r"([0-9a-f]{64})  (\d{1,15})  (\S+)")


@dataclass(frozen=True)
class Known:
    """A file with a recorded size in bytes."""

    sha256: str
    size: int
    name: str


def read(path: Path) -> Mapping[str, Known]:
    """Return the recorded files by sha256; {} without records.

    Raises:
        PinsError: a line is malformed.
    """
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            msg = f"{path}:{number}: {line[:60]!r} is not SHA256  BYTES  NAME"
            raise PinsError(msg, "update it with scripts/sizes.py")
        found[match[1]] = Known(match[1], int(match[2]), match[3])
    return found


@dataclass
class Progress:
    """Progress line of several downloads; called from any thread. State: bytes so far."""

    what: str
    files: int
    total: int | None
    """Bytes of all; None: unknown."""
    _here: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def arrived(self, name: str, here: int, *, done: bool = False) -> None:
        """Record the number of bytes of a file so far."""
        with self._lock:
            self._here[name] = here
            self._done |= {name} if done else set()
            what = f"{self.what} ({len(self._done)} of {self.files})"
            log.progress(what, sum(self._here.values()), self.total)


def duration(seconds: float) -> str:
    """Return a time in a readable unit, e.g. ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
