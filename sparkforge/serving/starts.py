"""Starts that came to nothing: counted over restarts, so that they do not go on for ever.

Docker's ``unless-stopped`` starts anew whatever ends, whatever its exit code, and a server reads up
to 65 GB before it fails again. So where a restart changes nothing (exit code 78), or several starts
in a row never became ready, the entrypoint does not end: it waits, unhealthy, with the reason in
its log and in the health check. Whoever stops or recreates the container has it try again.
"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import EX_CONFIG, EX_DATAERR

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Starts:
    """Counts the starts of one container's server, in a file that outlives the container's process.

    Attributes:
        path: the file; there is none while the last start became ready.
        limit: as many in a row may fail; 0: any number.
        say: takes a line for the log.
    """

    path: Path
    limit: int
    say: Callable[[str], None]

    @classmethod
    def of(cls, folder: Path, way: Sequence[str], limit: int, say: Callable[[str], None]) -> Starts:
        """Return the count of this container (by its host name) and this way to start a server."""
        text = "\0".join((socket.gethostname(), *way))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        return cls(folder / f"starts-{digest}.json", limit, say)

    def count(self) -> int:
        """Return how many starts in a row, with the present one, have not become ready."""
        try:
            return max(0, Document.load(self.path).get(int, "count"))
        except (OSError, DocumentError):  # none is there, or a damaged one: counted from the start
            return 0

    def begin(self) -> None:
        """Count one more; said where it is not the first."""
        count = self.count() + 1
        if count > 1:
            of = f" of {self.limit}" if self.limit else ""
            self.say(f"start {count}{of}: the last one never became ready")
        try:
            self.path.write_text(json.dumps({"count": count}), encoding="utf-8")
        except OSError as error:
            self.say(f"warning: failed starts are not counted: {error}")

    def forget(self) -> None:
        """Count from the start again: the server is ready, or somebody has stopped it."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.say(f"warning: {self.path} stays: {error}")

    def spent(self) -> bool:
        """Tell whether as many starts have failed as may."""
        return 0 < self.limit <= self.count()


def repeats(policy: str) -> bool:
    """Tell whether Docker starts a container with this restart policy anew without an end."""
    return policy in ("always", "unless-stopped", "on-failure")


def why_to_wait(code: int, starts: Starts | None) -> str:
    """Return why no server is to be started any more, or "".

    Args:
        code: exit code of the server that ended.
        starts: None: it had not been started yet.
    """
    if code in (EX_CONFIG, EX_DATAERR):
        return f"a restart changes nothing (exit code {code})"
    if starts is not None and starts.spent():
        return f"{starts.limit} starts in a row never became ready (the last exit code: {code})"
    return ""


def wait(told: Callable[[], bool]) -> None:
    """Return when somebody wants this process to end: ``told()``, or a signal from now on."""
    signals: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: signals.append(number))
    # no threading.Event: a handler that sets it waits for ever where it interrupts the waiting
    while not signals and not told():
        time.sleep(0.2)
