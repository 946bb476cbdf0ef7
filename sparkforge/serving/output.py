"""The server's output: passed on to the container's log, and searched for backends and deaths."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from sparkforge.serving.backends import Watch

_LINE_LIMIT = 1 << 16  # bytes of a line that are searched
# vLLM 0.31.0, of a worker and of an engine; sometimes it has None instead of the code
_DIED = re.compile(rb"died (?:unexpectedly \(exit code: |with exit code )(-?\d{1,3})\b")


@dataclass
class Output:
    """Copies the server's output to stdout."""

    watch: Watch
    """Finds the backends."""
    problems: list[str] = field(default_factory=list)
    """Of backends, not logged yet."""
    died: int | None = None
    """End of the first engine process that vLLM reports: an exit code, or a signal's number below
    zero."""

    def copy(self, source: int) -> None:
        """Copy until the end of a file descriptor."""
        rest = b""
        while chunk := os.read(source, 1 << 16):
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LINE_LIMIT:]
            for line in lines:
                if problem := self.watch.feed(line[:_LINE_LIMIT].decode(errors="replace")):
                    self.problems.append(problem)
                if self.died is None and (match := _DIED.search(line[:_LINE_LIMIT])) is not None:
                    self.died = int(match[1])
        if rest:
            os.write(1, b"\n")  # the last line is not terminated, and ours follow
