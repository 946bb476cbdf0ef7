"""Record of the files that warm-ups compiled, so that the next start can run a short warm-up.

One JSON file for each way to start a server of one build and device, next to the compiled kernels.
It is replaced atomically. A file that cannot be read counts as missing: then the full warm-up runs
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.serving import durable
from sparkforge.serving.document import Document, DocumentError

SCHEMA = 1
_RUNS, _LATE, _SHOWN = 10, 100, 40  # entries, and names of files in one entry


def now() -> str:
    """Return the date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Made:
    """The result of one step."""

    name: str
    seconds: float
    """Until its last answer."""
    compiled: int = 0
    """Number of new files in the caches."""
    kernels: Sequence[str] = ()
    """Names of their kernels."""
    problem: str = ""
    """The reason why it was refused or failed."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values, without empty ones."""
        found = asdict(self) | {"kernels": list(self.kernels)[:_SHOWN]}
        return {name: value for name, value in found.items() if value or name == "seconds"}


@dataclass
class Record:
    """A record and its file."""

    path: Path
    steps: str = ""
    """Digest of the full warm-up."""
    complete: bool = False
    """Such a warm-up was completed."""
    files: set[str] = field(default_factory=set)
    """New files of the caches, relative to their folder."""
    runs: list[Any] = field(default_factory=list)
    """Warm-ups, the newest last."""
    late: list[Any] = field(default_factory=list)
    """Compilations while users waited."""
    lengths: set[int] = field(default_factory=set)
    """Of prompts that users waited for; later warm-ups include them."""

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record; a missing or damaged one, or one of another schema, is empty."""
        try:
            found = Document.load(path)
            if found.get(int, "schema") != SCHEMA:
                return cls(path)
            lengths = (found.get(int, "lengths", n) for n in range(len(found.get(list, "lengths"))))
            return cls(
                path,
                found.get(str, "steps"),
                found.get(bool, "complete"),
                {str(file) for file in found.get(list, "files")},
                found.get(list, "runs"),
                found.get(list, "late"),
                {length for length in lengths if length > 0},
            )
        except (OSError, DocumentError):
            return cls(path)

    def lacks(self, steps: str, present: set[str]) -> str:
        """Return the reason why a short warm-up is not enough, or "".

        Args:
            steps: digest of the current full warm-up.
            present: files of the caches, as in ``files``.
        """
        if not self.complete:
            return "no complete warm-up is on record"
        if self.steps != steps:
            return "the record is of another warm-up"
        if gone := self.files - present:
            return f"{len(gone)} of {len(self.files)} recorded files are gone"
        return ""

    def add_run(self, run: Mapping[str, Any], gained: Iterable[str]) -> None:
        """Add a warm-up and its new files."""
        self.runs = [*self.runs, run][-_RUNS:]
        self.files |= set(gained)

    def add_late(
        self, kernels: Sequence[str], files: Sequence[str], lengths: Iterable[int]
    ) -> None:
        """Add a compilation while serving, and the lengths of the prompts at that time."""
        known = sorted(set(lengths))
        entry = {"when": now(), "kernels": list(kernels)[:_SHOWN], "files": len(files)}
        self.late = [*self.late, entry | {"prompts_up_to": known}][-_LATE:]
        self.files |= set(files)
        self.lengths |= set(known)

    def save(self) -> None:
        """Replace the file atomically; OSError if it cannot be written."""
        document = {
            "schema": SCHEMA,
            "steps": self.steps,
            "complete": self.complete,
            "lengths": sorted(self.lengths),
            "runs": self.runs,
            "late": self.late,
            "files": sorted(self.files),
        }
        durable.replace(self.path, json.dumps(document, indent=1) + "\n")
