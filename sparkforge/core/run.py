"""The only module that starts processes.

Every child has its own process group, which ends with sparkforge: after Ctrl-C or an error no
server or compiler stays.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sparkforge.core.errors import CommandError, MachineError, SparkforgeError, StoreError
from sparkforge.core.log import log

_TAIL_LINES = 40
_INSTALL_HINTS = {
    "git": "install git 2.34 or newer with the system's package manager",
    "docker": "install Docker Engine, or build without one: --engine none",
    "nvcc": "install NVIDIA's CUDA 13.0 toolkit (nvcc, crt, cudart headers), its bin on the PATH",
}


def call(
    *args: str | os.PathLike[str],
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    stream: bool | Callable[[str], None] = False,
    check: bool = True,
    timeout: float | None = None,
    guarded: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output.

    Args:
        args: program and arguments; printed with ``--verbose``.
        env: variables added to the present environment; None as a value removes one.
        stdin: bytes or a file for its standard input; empty by default.
        stream: show its output line by line while it runs (stdout and stderr together); a
            function gets each line instead of the log.
        timeout: seconds; None: no limit.
        guarded: end it also after a kill -9 of this process, for programs that run for seconds.

    Raises:
        MachineError: the program is missing.
        CommandError: it ended with an error (only with ``check``) or ran out of time.
    """
    command = resolve(args, cwd)
    data, source = (stdin, subprocess.PIPE) if isinstance(stdin, bytes) else (None, stdin)
    with _child(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL if source is None else source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stream else subprocess.PIPE,
        guarded=guarded,
    ) as child:
        if stream:
            assert child.stdout is not None
            out, err = _shown(child.stdout, stream if callable(stream) else log.raw), b""
            child.wait()
        else:
            try:
                out, err = child.communicate(data, timeout=timeout)
            except subprocess.TimeoutExpired:
                msg = f"{shlex.join(command)} did not finish within {timeout:.0f} s"
                raise CommandError(msg) from None
    result = subprocess.CompletedProcess(command, child.returncode, out, err)
    if check and result.returncode:
        raise failure(result)
    return result


def _shown(stream: IO[bytes], show: Callable[[str], None]) -> bytes:
    """Show a child's output as it arrives; return its final text, without progress lines."""
    kept = []
    rest = b""
    while piece := os.read(stream.fileno(), 1 << 16):
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + piece)
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            # progress lines of git and others end with \r, and the next one overwrites them
            if line.endswith(b"\r"):
                log.raw_progress(text)
                continue
            if text:
                show(text)
            kept.append(line)
    if rest:
        show(rest.decode(errors="replace").rstrip())
    return b"".join([*kept, rest])


@dataclass(frozen=True)
class Glimpse:
    """Output of a program that may be missing or hang."""

    code: int | None
    """Exit code; None: it is missing, could not start, or did not end in time."""
    out: str = ""
    err: str = ""
    """``out``, ``err``: its output as text, cut at the limit."""
    problem: str = ""
    """Reason for a missing exit code, or ""."""


def glimpse(*args: str, timeout_s: float, limit: int = 4 << 20) -> Glimpse:
    """Run a program that may be missing, hang or flood; its failures are values.

    Args:
        limit: bytes of each stream; a program that writes more is ended.
    """
    if not have(args[0]):
        return Glimpse(None, problem=f"{args[0]} is not on the PATH")
    kept, problem, pipe = (bytearray(), bytearray()), "", subprocess.PIPE

    def read(stream: IO[bytes], sink: bytearray) -> None:
        with stream:
            sink += stream.read(limit)  # more output meets a closed pipe

    try:
        with _child(
            resolve(args), cwd=None, env={"LC_ALL": "C"}, stdout=pipe, stderr=pipe, grace_s=0
        ) as child:
            streams, child.stdout, child.stderr = (child.stdout, child.stderr), None, None
            pairs = zip(streams, kept, strict=True)
            threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in pairs]
            for thread in threads:
                thread.start()
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                problem = f"{args[0]} did not finish within {timeout_s:.0f} s"
            stop(child, grace_s=0)
    except MachineError as error:
        return Glimpse(None, problem=error.what)
    for thread in threads:
        thread.join(1)
    if max(map(len, kept)) >= limit:
        problem = f"{args[0]} writes endless output"
    out, err = (bytes(data).decode(errors="replace") for data in kept)
    return Glimpse(None if problem else child.returncode, out, err, problem)


@contextmanager
def background(
    *args: str | os.PathLike[str],
    output: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    grace_s: float = 10.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block; its output goes to a file.

    At the end it gets SIGTERM and ``grace_s`` seconds, then its process group is killed. If this
    process is killed first, a guardian does that.
    """
    command = resolve(args)
    with (
        output.open("wb") as sink,
        _child(command, cwd=cwd, env=env, stdout=sink, grace_s=grace_s, guarded=True) as child,
    ):
        yield child


def replace_process(*args: str | os.PathLike[str]) -> None:
    """Replace this process with another program."""
    command = resolve(args)
    log.detail("+ exec " + shlex.join(command))
    log.end_progress()
    os.execv(command[0], command)


_living: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()
"""Held while a child starts, and from the end of the program on: none starts unseen."""


@contextmanager
def _child(
    command: Sequence[str],
    *,
    cwd: Path | None,
    env: Mapping[str, str | None] | None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int = subprocess.STDOUT,
    grace_s: float = 5.0,
    guarded: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    to = "" if isinstance(stdout, int) else f"  > {stdout.name}"
    log.detail(f"+ {shlex.join(command)}{to}")
    variables = {**os.environ, **(env or {})}
    try:
        with _starting:
            child = subprocess.Popen(
                command,
                cwd=cwd,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # its own group, so that its children can be ended with it
            )
            _living.add(child)
    except OSError as error:
        if error.filename != command[0]:  # its folder is missing, or no pipe can be opened
            raise
        raise _unusable(command[0], f"cannot be started: {error.strerror}") from error
    guardian = _guard(child.pid) if guarded else None
    try:
        yield child
    finally:
        stop(child, grace_s)
        _living.discard(child)
        if guardian is not None:
            guardian.communicate(b"x")  # ignores a guardian that has ended
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # unsent input of a child that has ended
                    pipe.close()


@atexit.register
def _end_all() -> None:
    """End children that a thread still waits for at the end of the program."""
    _starting.acquire()  # never released: a thread that wants to start another waits here
    for child in list(_living):
        stop(child, grace_s=0)


def stop(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a child and its descendants: SIGTERM first, then SIGKILL."""
    try:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(grace_s)
            except subprocess.TimeoutExpired:
                if grace_s:
                    log.warning(f"process {child.pid} did not stop within {grace_s:.0f} s: killed")
    finally:  # also when a second Ctrl-C ends the wait
        # the rest of the group: its id stays valid while any member lives
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(5)  # one that waits for a dead device ignores even SIGKILL


# Waits for the end of its input. A byte before that: all children have been ended. None: sparkforge
# was killed, and the guardian ends its children.
_GUARDIAN = """
import os, signal, sys, time
group = int(sys.argv[1])
if not sys.stdin.buffer.read(1):
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 0)):
        try:
            os.killpg(group, number)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                os.killpg(group, 0)
                time.sleep(0.2)
        except ProcessLookupError:
            break
"""


def _guard(group: int) -> subprocess.Popen[bytes]:
    """Start a guardian, which ends a process group even after a kill -9 of this process.

    The kernel's own way (prctl) sends one signal to one process. vLLM ignores it while it loads,
    and its workers would stay in any case.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARDIAN, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def group_alive(pid: int, wait_s: float = 60.0) -> bool:
    """Return whether a child's process group still exists after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)


def have(program: str) -> bool:
    """Return whether a program is on the PATH."""
    return shutil.which(program) is not None


def resolve(args: Sequence[str | os.PathLike[str]], cwd: Path | None = None) -> list[str]:
    """Return a command line with the full path of its program; MachineError if it is missing.

    A relative path stays as it is: it is one from the folder that the program runs in.
    """
    command = [os.fspath(arg) for arg in args]
    relative = os.sep in command[0] and not Path(command[0]).is_absolute()
    program = shutil.which(Path(cwd or "", command[0]) if relative else command[0])
    if program is None:
        raise _unusable(command[0], "not installed on this machine")
    return [command[0] if relative else program, *command[1:]]


def _unusable(program: str, why: str) -> MachineError:
    name = Path(program).name
    hint = _INSTALL_HINTS.get(name, f"install {name} and put it on the PATH")
    return MachineError(f"{name}: {why}", hint)


def failure_text(result: subprocess.CompletedProcess[bytes]) -> str:
    """Return a failed command and the end of its output."""
    lines = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
    return f"{shlex.join(result.args)} failed with exit code {result.returncode}\n{tail}"


def failure(result: subprocess.CompletedProcess[bytes]) -> SparkforgeError:
    """Return the error of a failed command."""
    text = failure_text(result)
    # git's fast-import reports it differently
    if os.strerror(errno.ENOSPC) in text or "Out of diskspace" in text:
        remedy = "free space, or put the store on a larger disk with --store DIR"
        return StoreError(f"the disk is full:\n{text}", remedy)
    return CommandError(text)
