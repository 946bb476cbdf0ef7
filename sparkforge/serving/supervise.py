"""Run the server as a child: pass on its output and our signals, and end it when it hangs.

Docker leaves an unhealthy container running; it restarts what *ends*. So a server that has answered
once and then makes no progress for ``hang_s`` is killed. While it loads, nothing is killed.
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
from sparkforge.serving.health import Client, Counters
from sparkforge.serving.options import EX_TEMPFAIL, StartError, say
from sparkforge.serving.profile import Watch

_GRACE_S, TRIAL_S = 30.0, 1800.0
LOAD_S = 1800.0  # of a pair: NCCL's own wait for the other rank, and those of loading, have no end
_DEATH_S = 5.0  # a server ends within this time after its engine, and logs the reason
_EVERY_S = 5.0  # between two checks of a server that has answered; less where a hang takes less
_LOOKS = 3  # that fail in a row: a container that was paused wakes up with an old clock
_SLOW_S = 600.0  # for a server that computes, and does not answer: one request may be slow
_COMPUTES = 0.05  # of one core, during a check: a busy machine has no more for it
# names of their processes
_COMPILERS = frozenset(
    ("ninja", "nvcc", "cicc", "ptxas", "ptxas-blackwell", "nvlink", "gcc", "g++", "cc1plus", "ld")
)


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


def _compiles(running: Mapping[int, tuple[str, str]]) -> bool:
    return bool(_COMPILERS & {name for name, _ in running.values()})


def kill(leader: int) -> None:
    """Kill all processes of a session: ninja gives each of its jobs a group of its own."""
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
class Phases:
    """What a start did so far, each with its seconds."""

    began: float = field(default_factory=time.monotonic)
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._since = self.began

    def end(self, name: str, note: str = "") -> None:
        """Note that a phase has ended, and that the next one begins."""
        since, self._since = self._since, time.monotonic()
        self.done.append(f"{name} {self._since - since:.0f}{f' ({note})' if note else ''}")

    def __str__(self) -> str:
        return f"{time.monotonic() - self.began:.0f} s: {', '.join(self.done)}"


@dataclass
class Server:
    """The server to run, and how to supervise it."""

    command: Sequence[str]  # with our plugin's options as users write them
    variables: Mapping[str, str]
    signals: Signals
    client: Client | None  # None: the half of a worker, which takes no requests
    expected: Mapping[str, str]  # backends that vLLM has to choose, by kind
    strict: bool = True  # end the server when it chooses another backend; else warn
    entrance: Door | None = None  # None: a worker
    hang_s: float = 60.0  # without progress, after the first answer, until it is killed; 0: never
    warm_up: Callable[[], str] = lambda: ""
    """Runs at the first answer, before the server counts as healthy; returns the problem, or ""."""
    trial: bool = False  # ends after its warm-up, with exit code 0 or 78, and serves no users
    weights: Sequence[Path] = ()  # files to drop from the page cache when they have been read
    starts: Path | None = None  # counts the starts that have not become ready
    link: Link | None = None
    guard: memory.Guard | None = None
    phases: Phases = field(default_factory=Phases)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._watch = Watch(self.expected)
        self._problems: list[str] = []  # of backends, not logged yet

    def run(self) -> int:
        """Run the server to its end; returns its exit code, or ours: docs/serving.md."""
        if self.guard is not None:
            self.guard.begin()
        # a worker's health is its link
        health.tell("preflight" if self.trial else "loading" if self.client else health.READY)
        child = self.signals.child = start(options.for_plugin(self.command), self.variables)
        reader = threading.Thread(target=self._copy_output, args=(child,), daemon=True)
        reader.start()
        code = 0
        try:
            self._supervise(child)
            child.terminate()  # a trial: by itself it frees what its processes share
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            reader.join(5)
            self._compare(missing=True)  # a line may come after the answer
        except StartError as error:
            code = error.code
            if str(error):
                say(f"error: {error}")
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

    def _supervise(self, child: subprocess.Popen[bytes]) -> None:
        """Supervise a server to its end, a trial to that of its warm-up; StartError for the end."""
        client, link, door, serves = self.client, self.link, self.entrance, False
        before: Counters = {}
        compiled = self._began
        while not serves:
            # loading, a check is cheap, and backends have to be known when it is healthy
            self._wait(child, 1)
            if client is None:
                serves = link is not None and link.peer_serves
            else:
                with suppress(Exception):  # it does not answer yet
                    before, serves = client.observe(None), True
            if link is not None and not serves:
                if _compiles(session(child.pid)):
                    compiled = time.monotonic()
                elif time.monotonic() - compiled > LOAD_S:
                    why = f"a rank or NCCL hangs: no token within {LOAD_S:.0f} s"
                    raise StartError(why, EX_TEMPFAIL)
        if client is not None:
            took_s = time.monotonic() - self._began
            say(f"first token after {took_s:.0f} s; backends: {self._watch}")
            took = ", ".join(f"{part} {s:.0f}" for part, s in self._watch.took_s.items())
            self.phases.end("vLLM", took)
            if not self.trial:
                self._compare(missing=True)
        if not self.trial:
            memory.drop(self.weights)
        if link is not None:
            link.tell()
        while client is None:
            self._wait(child)
        problems: list[str] = []

        def warm() -> None:
            try:
                problems.append(self.warm_up())
            except Exception as error:  # counts as any failure of the warm-up, and is logged
                time.sleep(_DEATH_S)
                problems.append(f"{type(error).__name__}: {error}")

        threading.Thread(target=warm, daemon=True).start()
        while not problems:
            self._wait(child)
        self.phases.end("warm-up")
        if problems[0]:
            raise StartError(f"{'' if self.trial else 'warm-up failed: '}{problems[0]}")
        if door is None or self.trial:
            return
        door.ready()
        health.tell(health.READY)
        os.sync()  # a power cut would leave kernels that are cut short
        if self.starts is not None:
            self.starts.unlink(missing_ok=True)
        say(f"ready after {self.phases}; {memory.described(memory.read())}")
        self._see_progress(client, door, child, before)

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
        for problem in problems:
            if self.strict:
                msg = f"{problem}; to serve anyway: SPARKFORGE_CHECKS=backends=warn"
                raise StartError(msg)
            say(f"warning: {problem}")

    def _see_progress(
        self, client: Client, door: Door, child: subprocess.Popen[bytes], before: Counters
    ) -> None:
        """Check the server's progress until it ends; raises StartError where it hangs."""
        since, failures, every_s = time.monotonic(), 0, min(_EVERY_S, self.hang_s / 12 or _EVERY_S)
        while True:
            now, computed_s = time.monotonic(), _computed_s(child.pid)
            try:
                before = client.observe(before)
                since, failures = now, 0
                door.stall(False)
            except Exception as error:  # any wrong answer is a failed check
                door.stall(True)
                computed_s = _computed_s(child.pid) - computed_s
                running, lasted = session(child.pid), time.monotonic() - since
                slow = isinstance(error, TimeoutError) and lasted < max(_SLOW_S, self.hang_s)
                if _compiles(running):
                    # a server ended now would build the kernel again at the next start, and again
                    say("no progress, but a compiler is running: waiting")
                    since, failures = time.monotonic(), 0
                elif slow and computed_s > _COMPUTES * client.timeout_s:
                    say("no answer, but the server computes: it may be one slow request: waiting")
                    failures = 0
                else:
                    failures += 1
                # the last check took time, too, and has to end within hang_s
                if self.hang_s and failures >= _LOOKS and lasted >= self.hang_s - client.timeout_s:
                    states = (f"{one} {name}: state {how}" for one, (name, how) in running.items())
                    why = f"{type(error).__name__}: {error} ({', '.join(states)})"
                    raise StartError(f"the server hangs: {why}", EX_TEMPFAIL) from None
            self._wait(child, every_s)


def _computed_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # the API server's
    return sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
