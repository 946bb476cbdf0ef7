"""Sizes of the locked files, for plans, progress, and as a limit of downloads.

A lock has hashes and no sizes, and not every index gives them. ``requirements/sizes.txt`` records
them; ``scripts/sizes.py`` writes it from the files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import PinsError

FILE = "requirements/sizes.txt"
_LINE = re.compile(r"([0-9a-f]{64})  (\d{1,15})  (\S+)")


@dataclass(frozen=True)
class Known:
    """A file with a recorded size in bytes."""

    sha256: str
    size: int
    name: str


def read(path: Path) -> Mapping[str, Known]:
    """Return the recorded files by sha256; {} without records; PinsError: a malformed line."""
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            match = _LINE.fullmatch(line)
            if match is None:
                msg = f"{path}:{number}: {line[:60]!r} is not SHA256  BYTES  NAME"
                raise PinsError(msg, "update it with scripts/sizes.py")
            found[match[1]] = Known(match[1], int(match[2]), match[3])
    return found
