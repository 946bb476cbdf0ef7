"""Failed starts: counted over restarts, so that they do not repeat for ever.

Docker's ``unless-stopped`` restarts a container after any exit code, and a server reads up to 65 GB
before it fails again. So where a restart changes nothing (exit code 78), or several starts in a row
never became ready, the entrypoint does not end. It waits, unhealthy, with the reason in its log and
in the health check. It tries again when the container is restarted or recreated.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.errors import EX_CONFIG, EX_DATAERR

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Starts:
    """Counts the starts of one container's server, in a file that outlives the container's process.

    Attributes:
        path: the file; it does not exist after a start that became ready. Its size in bytes is the
            count: a file without contents can be made longer on a full disk, too.
        limit: failed starts in a row; 0: any number.
    """

    path: Path
    limit: int
    say: Callable[[str], None]

    @classmethod
    def of(
        cls, folder: Path, identity: Sequence[str], limit: int, say: Callable[[str], None]
    ) -> Starts:
        """Return the count of this container (by its host name) and this kind of start.

        Args:
            identity: of ``Command.identity``.
        """
        text = "\0".join((socket.gethostname(), *identity))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        return cls(folder / f"starts-{digest}", limit, say)

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
            of = f" of {self.limit}" if self.limit else ""
            self.say(f"start {count}{of}: the last one never became ready")
        try:
            with self.path.open("ab") as file:
                file.truncate(count)
        except OSError as error:
            self.say(f"warning: failed starts are not counted: {error}")

    def forget(self) -> None:
        """Reset the count: the server is ready, or was stopped."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.say(f"warning: {self.path} stays: {error}")

    def spent(self) -> bool:
        """Return whether the limit is reached."""
        return 0 < self.limit <= self.count()


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
    if starts is not None and starts.spent():
        return f"{starts.limit} starts in a row never became ready (the last exit code: {code})"
    return ""


def wait(stopped: Callable[[], bool]) -> None:
    """Wait for a signal, or until ``stopped()``."""
    signals: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: signals.append(number))
    # not a threading.Event: a handler that sets it while it is waited for would block for ever
    while not signals and not stopped():
        time.sleep(0.2)
