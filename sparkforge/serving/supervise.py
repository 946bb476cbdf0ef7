"""Run the server as a child: pass on its output and our signals, and end it when it hangs.

Docker marks a container unhealthy and leaves it running; it restarts what *ends*. So a server that
has answered once and then makes no progress for ``hang_s`` is killed, and Docker's restart policy
restarts the container. While it loads, however long, nothing is killed.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.serving import health, memory, options
from sparkforge.serving.cluster import Link
from sparkforge.serving.door import Door
from sparkforge.serving.errors import EX_TEMPFAIL, StartError, say
from sparkforge.serving.health import Client, Counters
from sparkforge.serving.profile import Watch

_GRACE_S, TRIAL_S = 30.0, 1800.0
_LOOKS = 3  # that fail in a row: a container that was paused wakes up with an old clock
_SLOW_S = 600.0  # for a server that computes, and does not answer: one request may be slow
_COMPUTES = 0.05  # of one core, during a check: a busy machine has no more for it
_COMPILERS = frozenset(
    ("ninja", "nvcc", "cicc", "ptxas", "ptxas-blackwell", "nvlink", "gcc", "g++", "cc1plus", "ld")
)
"""Names of compilers' processes."""


def start(
    command: Sequence[str], variables: Mapping[str, str], stdout: int | None = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with one pipe for stdout and stderr, or ours."""
    return subprocess.Popen(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout else None,
        start_new_session=True,
    )


def session(leader: int) -> dict[int, tuple[str, str]]:
    """Return name and state of the living processes of a session, by their numbers."""
    found = {}
    for path in sorted(Path("/proc").glob("[0-9]*/stat")):
        with suppress(OSError):  # it ended
            name, _, rest = path.read_text(errors="replace").partition("(")[2].rpartition(") ")
            state, _, _, number, *_ = rest.split()
            if int(number) == leader and state != "Z":
                found[int(path.parent.name)] = (name, state)
    return found


def kill(leader: int) -> None:
    """Kill all processes of a session; SIGKILL ends a stopped process, too.

    The leader's process group is not enough: ninja gives each of its jobs a group of its own.
    """
    for process in session(leader):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class StoppedError(Exception):
    """A signal has come for the container, while no server runs."""


class Signals:
    """Passes the container's signals on to the child that runs; without one it raises."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.came.append(number)
        if self.child is None:
            raise StoppedError
        self.child.send_signal(number)


@dataclass
class Server:
    """The server to run, and how to supervise it."""

    command: Sequence[str]  # with our plugin's options as users write them
    variables: Mapping[str, str]
    signals: Signals
    client: Client | None  # sends our own requests; None: this server takes none
    expected: Mapping[str, str] = field(default_factory=dict)
    """Backends that vLLM has to choose, by kind."""
    strict: bool = True  # end the server when it chooses another backend; else warn
    hang_s: float = 60.0  # without progress, after the first answer, until it is killed; 0: never
    every_s: float = 5.0  # between two checks of a server that has answered
    warm_up: Callable[[], str] = lambda: ""
    """Runs at the first answer, before the server counts as healthy; returns the problem, or ""."""
    trial: bool = False  # ends after its warm-up, with exit code 0 or 78, and serves no users
    weights: Sequence[Path] = ()  # files to drop from the page cache when they have been read
    starts: Path | None = None  # counts the starts that have not become ready
    link: Link | None = None
    guard: memory.Guard | None = None
    entrance: Door | None = None

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._watch = Watch(self.expected)
        self._problems: list[str] = []  # of backends, not logged yet
        self._problem = ""  # of the warm-up

    def run(self) -> int:
        """Run the server to its end.

        The exit code is the server's own; 128 + N after signal N; 75 after a hang, and where the
        server ends with 0 without a signal; 78 after a wrong backend; 71 where memory ran short.
        """
        if self.guard is not None:
            self.guard.begin()
        state = "preflight" if self.trial else "loading"
        health.tell(state if self.client else health.READY)  # a worker's health is its link
        child = self.signals.child = start(options.for_plugin(self.command), self.variables)
        reader = threading.Thread(target=self._copy_output, args=(child,), daemon=True)
        reader.start()
        code = 0
        try:
            if self.client is None:
                self._follow(child)
            else:
                self._supervise(self.client, child)
            child.terminate()  # a trial: by itself it frees what its processes share
            child.wait(_GRACE_S)
            reader.join(5)
            self._compare(missing=True)  # a line may come after the answer
        except StartError as error:
            code = error.code
            if str(error):
                say(f"error: {error}")
        except subprocess.TimeoutExpired:
            say("the server does not end: killing it")
        finally:
            kill(child.pid)  # with all processes that the server may have left
            child.wait()
            if self.link is not None:
                self.link.close()
        reader.join(5)
        self.signals.child = None
        return code

    def _copy_output(self, child: subprocess.Popen[bytes]) -> None:
        """Copy the server's output to ours, and search it, until its end."""
        assert child.stdout is not None
        # a progress bar ends its lines with \r
        for line in io.TextIOWrapper(child.stdout, "utf-8", errors="replace", newline=""):
            sys.stdout.buffer.write(line.encode())
            sys.stdout.buffer.flush()
            if problem := self._watch.feed(line):
                self._problems.append(problem)

    def _follow(self, child: subprocess.Popen[bytes]) -> None:
        """Run the half of a worker, whose head takes the requests."""
        while self.link is not None and not self.link.peer_serves:
            self._wait(child)
        self._first_token()
        while True:
            self._wait(child)

    def _supervise(self, client: Client, child: subprocess.Popen[bytes]) -> None:
        """Supervise a server to its end, a trial to that of its warm-up; StartError for the end."""
        before = None
        while before is None:
            # loading, a check is cheap, and backends have to be known when it is healthy
            self._wait(child, 1)
            with suppress(Exception):  # it does not answer yet
                before = client.observe(None)
        say(f"first token after {time.monotonic() - self._began:.0f} s; backends: {self._watch}")
        if not self.trial:
            self._compare(missing=True)
            self._first_token()
        warming = threading.Thread(target=self._warm, daemon=True)
        warming.start()
        while warming.is_alive():
            self._wait(child)
        if self._problem:
            raise StartError(f"{'' if self.trial else 'warm-up failed: '}{self._problem}")
        if not self.trial:
            self._ready()
            self._see_progress(client, child, before)

    def _wait(self, child: subprocess.Popen[bytes], seconds: float = 0) -> None:
        """Wait, and check all but progress; StartError where the server ends or has to end."""
        end = time.monotonic() + seconds
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(0.5)
                if code or self.signals.came:
                    raise StartError("", code if code >= 0 else 128 - code)
                # vLLM ends so after the death of its engine, and Docker restarts no success
                raise StartError("the server ended by itself, as its output says", EX_TEMPFAIL)
            now = time.monotonic()
            if self.entrance is not None and self.entrance.died:
                raise StartError("the front door ended by itself", EX_TEMPFAIL)
            if self.guard is not None:
                self.guard.look(now)
            self._compare()
            if self.link is not None and self.link.problem:
                raise StartError(f"{self.link.problem}: ending this half, too", EX_TEMPFAIL)
            if self.trial and now - self._began > TRIAL_S:
                raise StartError(f"no result within {TRIAL_S:.0f} s")
            if now >= end:
                return

    def _compare(self, *, missing: bool = False) -> None:
        """Raise StartError for a problem with the backends, or warn; ``missing``: it is up."""
        problems = [*self._problems, *(self._watch.missing() if missing else ())]
        self._problems = []
        if problems and self.strict:
            msg = f"{'; '.join(problems)}; to serve anyway: SPARKFORGE_CHECKS=backends=warn"
            raise StartError(msg)
        for problem in problems:
            say(f"warning: {problem}")

    def _first_token(self) -> None:
        memory.log("the first token")
        memory.drop(self.weights)
        if self.link is not None:
            self.link.serves = True

    def _ready(self) -> None:
        health.tell(health.READY)
        if self.entrance is not None:
            self.entrance.ready()
        os.sync()  # a power cut would leave kernels that are cut short
        memory.log("ready")
        if self.starts is not None:
            self.starts.unlink(missing_ok=True)
        say(f"ready after {time.monotonic() - self._began:.0f} s")

    def _warm(self) -> None:
        try:
            self._problem = self.warm_up()
        except Exception as error:  # counts as any failure of the warm-up, and is logged
            self._problem = f"{type(error).__name__}: {error}"

    def _see_progress(
        self, client: Client, child: subprocess.Popen[bytes], before: Counters
    ) -> None:
        """Check the server's progress until it ends; raises StartError where it hangs."""
        since, failures = time.monotonic(), 0
        while True:
            now, computed_s = time.monotonic(), _computed_s(child.pid)
            try:
                before = client.observe(before)
                since, failures = now, 0
                self._stall(False)
            except Exception as error:  # any wrong answer is a failed check
                self._stall(True)
                computed_s = _computed_s(child.pid) - computed_s
                running, lasted = session(child.pid), time.monotonic() - since
                if _COMPILERS & {name for name, _ in running.values()}:
                    # a kernel that is built at its first use holds up the engine for minutes; a
                    # server ended now would build it again at the next start, and again
                    say("no progress, but a compiler is running: waiting")
                    since, failures = time.monotonic(), 0
                elif (
                    isinstance(error, TimeoutError)
                    and computed_s > _COMPUTES * client.timeout_s
                    and lasted < max(_SLOW_S, self.hang_s)
                ):
                    say("no answer, but the server computes: it may be one slow request: waiting")
                    failures = 0
                else:
                    failures += 1
                # the last check took time, too, and has to end within hang_s
                if self.hang_s and failures >= _LOOKS and lasted >= self.hang_s - client.timeout_s:
                    states = (f"{one} {name}: state {how}" for one, (name, how) in running.items())
                    why = f"{type(error).__name__}: {error} ({', '.join(states)})"
                    raise StartError(f"the server hangs: {why}", EX_TEMPFAIL) from None
            self._wait(child, self.every_s)

    def _stall(self, stalled: bool) -> None:
        if self.entrance is not None:
            self.entrance.stall(stalled)


def _computed_s(pid: int) -> float:
    """Return the seconds that the API server, a process beside the engine, has computed."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
