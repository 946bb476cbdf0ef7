"""What warm-ups compiled, kept beside the compiled kernels: what the next start may leave out.

One JSON file for each way to start a server of one build and device. It is replaced whole, and a
file that cannot be read counts as none: then the whole warm-up is made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.serving.document import Document, DocumentError

SCHEMA = 1
_RUNS, _LATE, _SHOWN = 10, 100, 40  # how many are kept, and of files named one by one


def now() -> str:
    """Return the time of day, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Made:
    """What one step did.

    Attributes:
        seconds: until its last answer.
        compiled: files that the caches gained meanwhile.
        kernels: what they belong to, by name.
        problem: why it was refused, or failed.
    """

    name: str
    seconds: float
    compiled: int = 0
    kernels: Sequence[str] = ()
    problem: str = ""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values; what is empty is left out."""
        found = asdict(self) | {"kernels": list(self.kernels)[:_SHOWN]}
        return {name: value for name, value in found.items() if value or name == "seconds"}


@dataclass
class Record:
    """The file, and what is in it.

    Attributes:
        steps: digest of the whole warm-up that it is about.
        complete: whether such a warm-up came to its end.
        files: what the caches gained, paths below the folder of the caches.
        runs: each warm-up, the newest last.
        late: what was compiled while users waited.
        lengths: of prompts that users waited for; the next warm-ups have them, too.
    """

    path: Path
    steps: str = ""
    complete: bool = False
    files: set[str] = field(default_factory=set)
    runs: list[Any] = field(default_factory=list)
    late: list[Any] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read it; one that is missing, damaged or of another schema is empty."""
        try:
            found = Document.load(path)
            if found.get(int, "schema") != SCHEMA:
                return cls(path)
            lengths = (found.get(int, "lengths", n) for n in range(len(found.get(list, "lengths"))))
            return cls(
                path,
                found.get(str, "steps"),
                found.get(bool, "complete"),
                {str(one) for one in found.get(list, "files")},
                found.get(list, "runs"),
                found.get(list, "late"),
                {one for one in lengths if one > 0},
            )
        except (OSError, DocumentError):
            return cls(path)

    def lacks(self, steps: str, present: set[str]) -> str:
        """Say why a short warm-up would not do, or nothing.

        Args:
            steps: digest of the whole warm-up as it is now.
            present: files that the caches have, as ``files``.
        """
        if not self.complete:
            return "no complete warm-up is on record"
        if self.steps != steps:
            return "the record is about another warm-up"
        if gone := self.files - present:
            return f"{len(gone)} of {len(self.files)} recorded files are gone"
        return ""

    def add_run(self, run: Mapping[str, Any], gained: Iterable[str]) -> None:
        """Note one warm-up and the files that the caches gained with it."""
        self.runs = [*self.runs, run][-_RUNS:]
        self.files |= set(gained)

    def add_late(
        self, kernels: Sequence[str], files: Sequence[str], lengths: Iterable[int]
    ) -> None:
        """Note what was compiled while serving, and prompts of what lengths were answered then."""
        known = sorted(set(lengths))
        entry = {"when": now(), "kernels": list(kernels)[:_SHOWN], "files": len(files)}
        self.late = [*self.late, entry | {"prompts_up_to": known}][-_LATE:]
        self.files |= set(files)
        self.lengths |= set(known)

    def save(self) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written.
        """
        document = {
            "schema": SCHEMA,
            "steps": self.steps,
            "complete": self.complete,
            "lengths": sorted(self.lengths),
            "runs": self.runs,
            "late": self.late,
            "files": sorted(self.files),
        }
        whole = self.path.with_name(f"{self.path.stem}-{os.getpid()}.tmp")
        try:
            whole.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            whole.replace(self.path)
        finally:
            whole.unlink(missing_ok=True)
