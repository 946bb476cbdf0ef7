"""The only module that starts processes, and threads that wait for them.

Every child has its own process group, which ends with sparkforge: after Ctrl-C or an error no
server or compiler stays.
"""

import atexit
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from sparkforge.core.errors import CommandError, MachineError
from sparkforge.core.log import log

_TAIL_LINES = 40
_T = TypeVar("_T")
_R = TypeVar("_R")


def call(
    *args: str | os.PathLike[str],
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    stream: bool | Callable[[str], None] = False,
    check: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output.

    ``env`` changes the present environment; None removes a variable. ``stream`` shows the output
    line by line (stdout and stderr together), or gives each line to a function. MachineError: the
    program is missing. CommandError: it failed (only with ``check``), or took ``timeout`` seconds.
    """
    command, pipe = [os.fspath(arg) for arg in args], subprocess.PIPE
    data = stdin if isinstance(stdin, bytes) else None
    source = pipe if isinstance(stdin, bytes) else stdin or subprocess.DEVNULL
    errors = subprocess.STDOUT if stream else pipe
    with _child(command, env, cwd=cwd, stdin=source, stdout=pipe, stderr=errors) as child:
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
    """Show a child's output as it arrives; return it without progress lines."""
    kept = []
    for line in stream:
        # progress lines of git and others end with \r, and the next one overwrites them
        kept.append(re.sub(rb"[^\n]*\r(?!\n)", b"", line))
        if text := kept[-1].decode(errors="replace").rstrip():
            show(text)
    return b"".join(kept)


@dataclass(frozen=True)
class Glimpse:
    """Output of a program that may be missing or hang."""

    code: int | None  # None: it is missing, could not start, or did not end in time (``problem``)
    out: str = ""
    err: str = ""
    problem: str = ""


def glimpse(*args: str, timeout_s: float) -> Glimpse:
    """Run a program that may be missing or hang; its failures are values."""
    try:
        done = call(*args, env={"LC_ALL": "C"}, check=False, timeout=timeout_s)
    except (MachineError, CommandError) as error:
        return Glimpse(None, problem=error.what)
    out, err = (data.decode(errors="replace") for data in (done.stdout, done.stderr))
    return Glimpse(done.returncode, out, err)


@contextmanager
def background(
    *args: str | os.PathLike[str],
    output: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    grace_s: float = 10.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block; its output goes to a file.

    At the end it gets SIGTERM and ``grace_s`` seconds, then its process group is killed.
    """
    log.detail(f"output in {output}")
    with (
        output.open("wb") as sink,
        _child(args, env, grace_s, cwd=cwd, stdout=sink, stderr=sink) as child,
    ):
        yield child


def replace_process(*args: str | os.PathLike[str]) -> None:
    """Replace this process with another program."""
    log.detail("+ exec " + shlex.join(os.fspath(arg) for arg in args))
    try:
        os.execvp(args[0], args)
    except OSError as error:
        raise _unusable(os.fspath(args[0]), error) from error


_living: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()
"""Held while a child starts, and from the end of the program on: none starts unseen."""


@contextmanager
def _child(
    args: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str | None] | None,
    grace_s: float = 5.0,
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    **how: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    command = [os.fspath(arg) for arg in args]
    log.detail(f"+ {shlex.join(command)}")
    variables = {**os.environ, **(env or {})}
    how |= {"env": {name: value for name, value in variables.items() if value is not None}}
    try:
        with _starting:
            # its own session is its own process group, so that its children can be ended with it
            child = subprocess.Popen(command, stdin=stdin, start_new_session=True, **how)
            _living.add(child)
    except OSError as error:
        if error.filename != command[0]:  # its folder is missing, or no pipe can be opened
            raise
        raise _unusable(command[0], error) from error
    try:
        yield child
    finally:
        stop(child, grace_s)
        _living.discard(child)
        for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
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


def group_alive(pid: int, wait_s: float = 60.0) -> bool:
    """Return whether a child's process group still exists after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.1)
        return True
    return False


def _unusable(program: str, error: OSError) -> MachineError:
    name = Path(program).name
    missing = isinstance(error, FileNotFoundError)
    why = "not installed on this machine" if missing else f"cannot be started: {error.strerror}"
    return MachineError(f"{name}: {why}", f"install {name} and put it on the PATH")


def failure(result: subprocess.CompletedProcess[bytes]) -> CommandError:
    """Return the error of a failed command, with the end of its output."""
    lines = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()
    tail = "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])
    command = shlex.join(result.args)
    return CommandError(f"{command} failed with exit code {result.returncode}\n{tail}")


def in_parallel(
    work: Callable[[_T, threading.Event], _R], items: Sequence[_T], width: int
) -> Iterator[_R]:
    """Yield the results of work on many items at once, in order.

    A thread pool would wait for all running work after a failure or Ctrl-C. These threads get an
    event that says that their results are no longer needed, and otherwise end with the program.
    """
    futures: list[Future[_R]] = [Future() for _ in items]
    todo = iter(list(zip(items, futures, strict=True)))  # threads may share a list's iterator
    stopping = threading.Event()

    def worker() -> None:
        for item, future in todo:
            if stopping.is_set():
                return
            try:
                future.set_result(work(item, stopping))
            except BaseException as error:
                future.set_exception(error)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(width)]
    for thread in threads:
        thread.start()
    try:
        for future in futures:
            yield future.result()
    finally:
        stopping.set()
        deadline = time.monotonic() + 1.0  # for a failed run's other work to notice
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
