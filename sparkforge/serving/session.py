"""The processes of a server: all of the session that it has begun."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """What one looks at first after a hang; ``waits_in`` is a function of the kernel, or 0."""

    pid: int
    name: str
    state: str
    waits_in: str


def session(leader: int) -> list[Process]:
    """Return the living processes of the session that ``leader`` has begun."""
    found = []
    for stat in sorted(Path("/proc").glob("[0-9]*/stat")):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
            waits_in = (stat.parent / "wchan").read_text(encoding="ascii", errors="replace")
        except OSError:  # it ended, or is another user's
            continue
        match = re.match(r"(\d+) \((.*)\) (\S) \d+ \d+ (\d+) ", text, re.DOTALL)
        if match is not None and int(match[4]) == leader and match[3] != "Z":
            found.append(Process(int(match[1]), match[2], match[3], waits_in))
    return found


def kill(leader: int) -> None:
    """End all of a session; SIGKILL ends a stopped process, too.

    The leader's group is not enough: ninja gives each of its jobs a group of its own.
    """
    for one in session(leader):
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def ended_by(code: int | None) -> str:
    """Say what a process ended by, as far as its exit code tells."""
    if not code:
        return ""
    if code > 0:
        return f" (exit code {code})"
    try:
        return f" ({signal.Signals(-code).name})"
    except ValueError:
        return f" (signal {-code})"
