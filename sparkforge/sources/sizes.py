"""Sizes of the locked files, for plans and for the remaining time.

A lock has hashes and no sizes, and not every index gives them. ``requirements/sizes.txt`` records
them; ``scripts/sizes.py`` writes it from the files. Nothing is checked by size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from sparkforge.core.errors import PinsError
from sparkforge.core.log import human_bytes, log

FILE = "requirements/sizes.txt"
_LINE = re.compile(r"([0-9a-f]{64})  (\d{1,15})  (\S+)")
_SETTLED_S = 2.0  # below that a rate is meaningless


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
    """Progress line of several downloads: bytes, share, and remaining time.

    State: bytes so far. ``sizes``: known sizes by file name; the server gives the others with the
    first bytes.
    """

    what: str
    names: tuple[str, ...]
    sizes: dict[str, int]
    _here: dict[str, int] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _fetched: int = 0  # in this run: files of the store do not show the network's speed
    _since: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def arrived(self, name: str, here: int, total: int | None) -> None:
        """Record the number of bytes of a file so far; called from any thread."""
        with self._lock:
            self._since = self._since or time.monotonic()
            # a continued download starts with the bytes of an earlier run
            self._fetched += here - self._here.get(name, here)
            self._here[name] = here
            if total is not None:
                self.sizes[name] = total
            self._show()

    def finished(self, name: str, size: int) -> None:
        """Record a complete file, fetched or from the store."""
        with self._lock:
            self._here[name] = self.sizes[name] = size
            self._done.add(name)
            self._show()

    def _show(self) -> None:
        done = sum(self._here.values())
        files = f"{self.what} ({len(self._done)} of {len(self.names)})"
        known = all(name in self.sizes for name in self.names)
        total = sum(self.sizes.values()) if known else None
        log.progress(files, done, total, note=self._left(total, done))

    def _left(self, total: int | None, done: int) -> str:
        waited = time.monotonic() - self._since if self._since else 0.0
        if total is None or waited < _SETTLED_S or not self._fetched or done >= total:
            return ""
        rate = self._fetched / waited
        return f"{human_bytes(rate)}/s, about {duration((total - done) / rate)} left"


def duration(seconds: float) -> str:
    """Return a time in a readable unit, e.g. ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
