"""Run the server as a child: pass on its words and our signals, and end it when it hangs.

Docker marks a container unhealthy and leaves it running; it restarts what *ends*. So a server that
has answered once and then makes no progress for ``hang_s`` is killed, and Docker's restart policy
starts the container anew. While it loads, however long, nothing is killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.serving import state
from sparkforge.serving.backends import SENTENCES, Watch
from sparkforge.serving.cluster import Link
from sparkforge.serving.progress import PROBLEMS, Client, Counters
from sparkforge.serving.warmup import WarmUp

EX_TEMPFAIL = 75  # sysexits.h: try again
EX_CONFIG = 78

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A kernel that is built at its first use holds up the engine for minutes; ended, it would be built
# again at the next start, and again.
_COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "fatbinary"})
_LINE_LIMIT = 1 << 16  # bytes of one line that are searched


def say(text: str) -> None:
    """Print one line of our own between the server's."""
    print(f"entrypoint: {text}", file=sys.stderr, flush=True)


@dataclass
class Hang:
    """Decides when a server counts as hung. Times in seconds of the monotonic clock.

    One failed look is no proof, and neither is a long time without a look: a container that was
    paused wakes up with an old clock. It takes ``looks`` failures in a row, and ``limit_s`` since
    the last success.
    """

    limit_s: float
    looks: int = 3
    answered: bool = False
    _since: float = 0.0
    _failures: int = 0

    def well(self, now: float) -> None:
        """Note a success that began at ``now``."""
        self.answered, self._since, self._failures = True, now, 0

    def excused(self, now: float) -> None:
        """Note a failure at ``now`` that has a good reason."""
        self._since, self._failures = now, 0

    def ill(self, now: float) -> bool:
        """Note a failure; returns whether the server is to be ended."""
        self._failures += 1
        enough = self._failures >= self.looks and now - self._since >= self.limit_s
        return self.answered and self.limit_s > 0 and enough


@dataclass(frozen=True)
class Plan:
    """What to run, and what to hold it against.

    Attributes:
        client: asks the server; None: it is not looked at.
        strict: end the server when a backend is not the expected one; else warn.
        hang_s: seconds without progress, after the first answer, until it is killed; 0: never.
        every_s: seconds between two looks at a server that has answered.
        at_ready: called once, at the first answer.
        warm_up: what is done then, before the health check may call the server healthy.
        warm_strict: end the server when that fails; else warn.
        link: to the other machine that serves half of the model; None: this one serves alone.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    expected: Mapping[str, str]
    client: Client | None
    strict: bool = True
    hang_s: float = 60.0
    every_s: float = 5.0
    at_ready: Callable[[], None] = lambda: None
    warm_up: WarmUp | None = None
    warm_strict: bool = True
    link: Link | None = None


@dataclass
class _Output:
    """Passes the child's words on, and looks for backends in them.

    Attributes:
        problems: what is wrong with the backends and was not told yet.
        told_to_end: whether a signal was passed on to the server.
    """

    watch: Watch
    problems: list[str] = field(default_factory=list)
    told_to_end: bool = False

    def run(self, source: int) -> None:
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


def run(plan: Plan) -> int:
    """Run the server to its end; returns the exit code for this process.

    That is the server's own; 128 + N after signal N; 75 after a hang, and where the server ends
    with 0 though nobody told it to; 78 after a wrong backend.
    """
    start = time.monotonic()
    tell("loading" if plan.warm_up else state.READY)
    if plan.warm_up:
        plan.warm_up.begin()
    child = subprocess.Popen(
        plan.command, env=dict(plan.variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    output = _Output(Watch(plan.expected))

    def pass_on(number: int, frame: object) -> None:
        output.told_to_end = True
        if child.poll() is None:
            child.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, pass_on)
    reader = threading.Thread(target=output.run, args=(child.stdout.fileno(),), daemon=True)
    reader.start()
    try:
        code = _attend(plan, child, output, start)
    finally:
        _kill(child)  # also what the server may have left behind
        if plan.warm_up:
            plan.warm_up.end()
    reader.join(5)
    return code


def tell(words: str) -> None:
    """Tell the health check how far the server is."""
    try:
        state.write(words)
    except OSError as error:
        say(f"warning: the health check cannot be told: {error}")


class _Warming(threading.Thread):
    """A warm-up at work; the supervisor attends to the server meanwhile."""

    def __init__(self, plan: WarmUp) -> None:
        super().__init__(daemon=True)
        self._plan = plan
        self.problem = ""

    def run(self) -> None:
        try:
            self.problem = self._plan.run()
        except Exception as error:  # it is told, and counts as any failure of the warm-up
            self.problem = f"{type(error).__name__}: {error}"


def _attend(plan: Plan, child: subprocess.Popen[bytes], output: _Output, start: float) -> int:
    hang = Hang(plan.hang_s)
    before: Counters | None = None
    warming: _Warming | None = None
    next_look = start
    told_ready = False
    while True:
        try:
            code = child.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
        else:
            if code == 0 and hang.answered and not output.told_to_end:
                # so does vLLM after the death of its engine, and nothing restarts a success
                say("error: the server ended by itself; its words above say why")
                return EX_TEMPFAIL
            return code if code >= 0 else 128 - code
        if output.problems and not _tolerated(plan, output.problems):
            return EX_CONFIG
        if plan.link is not None:
            if why := plan.link.problem():
                say(f"{why}: ending this half, to be started anew with the other")
                return EX_TEMPFAIL
            if plan.client is None and not told_ready and plan.link.peer_serves():
                told_ready = True
                plan.at_ready()
        now = time.monotonic()
        if warming is not None and not warming.is_alive():
            if not _warmed(plan, warming.problem):
                return EX_CONFIG
            say(f"ready after {now - start:.0f} s")
            warming, next_look = None, now
        if plan.client is None or warming is not None or now < next_look:
            continue
        try:
            before = plan.client.observe(before)
        except PROBLEMS as error:
            if hang.answered and _COMPILERS.intersection(one.name for one in session(child.pid)):
                say("no progress, but a compiler is at work: waiting for it")
                hang.excused(time.monotonic())
            elif hang.ill(time.monotonic()) and child.poll() is None:
                say(f"the server hangs: {type(error).__name__}: {error}")
                say(f"no progress for {plan.hang_s:.0f} s: ending it, to be started anew")
                for one in session(child.pid):
                    say(f"  {one.pid} {one.name}: state {one.state}, waits in {one.waits_in}")
                return EX_TEMPFAIL
        else:
            if not hang.answered:
                say(f"first token after {now - start:.0f} s; backends: {_shown(output.watch)}")
                if not _tolerated(plan, output.watch.missing()):
                    return EX_CONFIG
                plan.at_ready()
                if plan.link is not None:
                    plan.link.serving()
                if plan.warm_up:
                    warming = _Warming(plan.warm_up)
                    warming.start()
            elif plan.warm_up:
                plan.warm_up.look()
            hang.well(now)
        # while it loads a look is cheap, and the backends are to be known when Docker says healthy
        next_look = time.monotonic() + (plan.every_s if hang.answered else 1)


def _warmed(plan: Plan, problem: str) -> bool:
    """Say what went wrong in a warm-up; returns whether the server may serve."""
    if problem:
        say(f"{'error' if plan.warm_strict else 'warning'}: warm-up failed: {problem}")
        if plan.warm_strict:
            say("to serve all the same: SPARKFORGE_WARM_UP_FAILURE=warn")
            return False
    tell(state.READY)
    return True


def _tolerated(plan: Plan, problems: list[str]) -> bool:
    """Say what is wrong with the backends; returns whether to go on."""
    for problem in problems:
        say(f"{'error' if plan.strict else 'warning'}: {problem}")
    if problems and plan.strict:
        say("to serve all the same: SPARKFORGE_BACKEND_CHECK=warn")
        return False
    problems.clear()
    return True


def _shown(watch: Watch) -> str:
    seen = [(kind, watch.seen[kind]) for kind in SENTENCES if kind in watch.seen]
    return ", ".join(f"{kind} {'/'.join(sorted(names))}" for kind, names in seen) or "unknown"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the server and all of its session; SIGKILL ends a stopped process, too.

    Its group is not enough: ninja gives each of its jobs a group of its own.
    """
    for one in session(child.pid):
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait()


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
