"""Facts that outlive a process: the state for the health check, and the count of failed starts.

The health check is a process of its own. It reads a file in the folder for temporary files, which
names this start of the container: a state from an earlier start does not count.

Docker's ``unless-stopped`` restarts a container after any exit code, and a server reads up to 65 GB
before it fails again. So where a restart changes nothing (exit code 65 or 78), or three starts in a
row never became ready, the entrypoint does not end. It waits, unhealthy, until the container is
restarted or recreated.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.serving.errors import EX_CONFIG, EX_DATAERR, say

READY = "ready"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMIT = 3  # failed starts in a row


@dataclass(frozen=True)
class State:
    """Progress of the server."""

    text: str
    """For the health check's line; ``READY`` once the server may count as healthy."""
    given_up: bool = False
    """No server will be started any more; the text gives the reason."""


def this_start() -> str:
    """Return the start time of process 1, which identifies this start of the container."""
    return Path("/proc/1/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]


def path() -> Path:
    """Return the file of the state."""
    return Path(tempfile.gettempdir()) / "sparkforge-state.json"


def tell(text: str, *, given_up: bool = False) -> None:
    """Store the state; a failure is logged."""
    temporary = path().with_suffix(f".{os.getpid()}")
    try:
        document = {"start": this_start(), **asdict(State(text, given_up))}
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path())
    except OSError as error:
        say(f"warning: the health check does not get the server's state: {error}")


def read() -> State:
    """Return the state; ``READY`` where there is none of this start: then the server is asked."""
    try:
        found = json.loads(path().read_bytes())
        if found["start"] == this_start():
            return State(str(found["text"]), bool(found["given_up"]))
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        pass
    return State(READY)


@dataclass(frozen=True)
class Starts:
    """Counts the starts of one container's server that have not become ready.

    Attributes:
        path: a file whose size in bytes is the count; it does not exist after a start that became
            ready. A file without contents can be made longer on a full disk, too.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path, identity: Sequence[str]) -> Starts:
        """Return the count of this container (by its host name) and this kind of start."""
        text = "\0".join((socket.gethostname(), *identity))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        return cls(folder / f"starts-{digest}")

    def count(self) -> int:
        """Return the starts in a row, with this one, that have not become ready."""
        try:
            return self.path.stat().st_size
        except OSError:  # missing
            return 0

    def begin(self) -> None:
        """Count one more; logs it from the second on."""
        count = self.count() + 1
        if count > 1:
            say(f"start {count} of {LIMIT}: the last one never became ready")
        try:
            with self.path.open("ab") as file:
                file.truncate(count)
        except OSError as error:
            say(f"warning: failed starts are not counted: {error}")

    def forget(self) -> None:
        """Reset the count: the server is ready, or was stopped."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            say(f"warning: {self.path} stays: {error}")


def repeats(policy: str) -> bool:
    """Return whether Docker restarts a container with this policy without limit."""
    return policy in ("always", "unless-stopped", "on-failure")


def why_to_wait(code: int, starts: Starts | None) -> str:
    """Return the reason to start no further server, or "".

    Args:
        code: exit code of the last one.
        starts: None: it was not started.
    """
    if code in (EX_CONFIG, EX_DATAERR):
        return f"a restart changes nothing (exit code {code})"
    if starts is not None and starts.count() >= LIMIT:
        return f"{LIMIT} starts in a row never became ready (the last exit code: {code})"
    return ""


def wait(stopped: Callable[[], bool]) -> None:
    """Wait for a signal, or until ``stopped()``."""
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: signals.append(number))
    # not a threading.Event: a handler that sets it while it is waited for would block for ever
    while not signals and not stopped():
        time.sleep(0.2)
