"""The processes that this program starts: each leads a session of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class Process:
    """A process in a hang's report; ``waits_in`` is a function of the kernel, or 0."""

    pid: int
    name: str
    state: str
    waits_in: str


def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program with one pipe for stdout and stderr."""
    return subprocess.Popen(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def beside(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program with this process's output and more variables."""
    env = {**os.environ, **variables}
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by a program, so that it gets the container's signals itself.

    Raises:
        OSError: there is no such program.
    """
    os.execv(command[0], [*command])


def session(leader: int) -> list[Process]:
    """Return the living processes of a session."""
    processes = []
    for stat in sorted(Path("/proc").glob("[0-9]*/stat")):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
            waits_in = (stat.parent / "wchan").read_text(encoding="ascii", errors="replace")
        except OSError:  # it ended, or is another user's
            continue
        match = re.match(r"(\d+) \((.*)\) (\S) \d+ \d+ (\d+) ", text, re.DOTALL)
        if match is not None and int(match[4]) == leader and match[3] != "Z":
            processes.append(Process(int(match[1]), match[2], match[3], waits_in))
    return processes


def computed_s(pid: int) -> float:
    """Return the seconds that all threads of a process have computed; 0 where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def kill(leader: int) -> None:
    """Kill all processes of a session; SIGKILL ends a stopped process, too.

    The leader's process group is not enough: ninja gives each of its jobs a group of its own.
    """
    for process in session(leader):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
