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

from sparkforge.serving import state
from sparkforge.serving.backends import SENTENCES, Watch
from sparkforge.serving.cluster import Link
from sparkforge.serving.errors import EX_CONFIG, EX_OSERR, EX_TEMPFAIL
from sparkforge.serving.guard import Guard
from sparkforge.serving.hang import Hang
from sparkforge.serving.progress import Client, Counters, NoTokenError
from sparkforge.serving.session import ended_by, kill, session
from sparkforge.serving.warmup import WarmUp

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A kernel that is built at its first use holds up the engine for minutes; ended, it would be built
# again at the next start, and again.
_COMPILERS = frozenset(
    {
        "ninja",
        "nvcc",
        "cicc",
        "ptxas",
        "ptxas-blackwell",
        "cudafe++",
        "fatbinary",
        "nvlink",
        "gcc",
        "g++",
        "c++",
        "cc1",
        "cc1plus",
        "as",
        "collect2",
        "ld",
        "clang",
        "clang++",
    }
)
_GRACE_S = 30.0
_LINE_LIMIT = 1 << 16  # bytes of one line that are searched
# vLLM 0.31.0 of a worker and of an engine; now and then it has None in place of the code
_DIED = re.compile(rb"died (?:unexpectedly \(exit code: |with exit code )(-?\d{1,3})\b")


def say(text: str) -> None:
    """Print one line of our own between the server's."""
    print(f"entrypoint: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What to run, and what to hold it against.

    Attributes:
        client: asks the server; None: it is not looked at.
        strict: end the server when a backend is not the expected one; else warn.
        hang_s: seconds without progress, after the first answer, until it is killed; 0: never.
        every_s: seconds between two looks at a server that has answered.
        at_ready: called once, at the first answer.
        when_ready: called once, when users are served: after the warm-up, where there is one.
        warm_up: what is done then, before the health check may call the server healthy.
        warm_strict: end the server when that fails; else warn.
        trial: what the server is started for, in place of users: called at the first answer,
            returns what is wrong, or nothing. Then the server ends: with 0, or 78.
        trial_s: seconds for all of that, from the start of the server.
        link: to the other machine that serves half of the model; None: this one serves alone.
        guard: of memory; None: nobody watches it.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    expected: Mapping[str, str]
    client: Client | None
    strict: bool = True
    hang_s: float = 60.0
    every_s: float = 5.0
    at_ready: Callable[[], None] = lambda: None
    when_ready: Callable[[], None] = lambda: None
    warm_up: WarmUp | None = None
    warm_strict: bool = True
    trial: Callable[[], str] | None = None
    trial_s: float = 1800.0
    link: Link | None = None
    guard: Guard | None = None


@dataclass(frozen=True)
class End:
    """How a server ended.

    Attributes:
        code: exit code for this process.
        told: whether a signal came for the server by now: somebody wants it to end.
    """

    code: int
    told: Callable[[], bool] = lambda: False


@dataclass
class _Output:
    """Passes the child's words on, and looks for backends and deaths in them.

    Attributes:
        problems: what is wrong with the backends and was not told yet.
        died: how the first of the engine's processes ended that vLLM told of: an exit code, or a
            signal's number below zero.
        told_to_end: whether a signal was passed on to the server.
    """

    watch: Watch
    problems: list[str] = field(default_factory=list)
    died: int | None = None
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
                if self.died is None and (match := _DIED.search(line[:_LINE_LIMIT])) is not None:
                    self.died = int(match[1])
        if rest:
            os.write(1, b"\n")  # its last line has no end, and ours come after it


def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with one pipe for all that it prints."""
    return subprocess.Popen(
        command,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(plan: Plan) -> End:
    """Run the server to its end; returns the exit code for this process, among other things.

    That is the server's own; 128 + N after signal N; 75 after a hang, and where the server ends
    with 0 though nobody told it to; 78 after a wrong backend; 71 where memory ran short.
    """
    if plan.guard is not None:
        plan.guard.begin()
    tell("preflight" if plan.trial else "loading" if plan.warm_up else state.READY)
    if plan.warm_up:
        plan.warm_up.begin()
    child = start(plan.command, plan.variables)
    assert child.stdout is not None
    output = _Output(Watch(plan.expected))
    attendant = _Attendant(plan, child, output)

    def pass_on(number: int, frame: object) -> None:
        output.told_to_end = True
        if child.poll() is None:
            child.send_signal(number)

    before = [signal.signal(number, pass_on) for number in _SIGNALS]
    reader = threading.Thread(target=output.run, args=(child.stdout.fileno(),), daemon=True)
    reader.start()
    try:
        code = attendant.run()
        if plan.trial:
            _end(child)
    finally:
        kill(child.pid)  # also what the server may have left behind
        child.wait()
        if plan.warm_up:
            plan.warm_up.end()
        if plan.link is not None:
            plan.link.close()
        if plan.guard is not None:
            plan.guard.close()
    reader.join(5)
    if plan.trial:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)  # another server follows, and a download before it
        # only now: a line may come after the answer
        problems = [*output.problems, *output.watch.missing()]
        if code == 0 and not output.told_to_end and not _tolerated(plan, problems):
            code = EX_CONFIG
    if attendant.by_itself:
        say("error: the server ended by itself; its words above say why")
    if attendant.died_at_first_token():
        died = attendant.ended if output.died is None else output.died
        say(f"error: the engine died{ended_by(died)} while answering the first token")
    elif output.died is not None and not attendant.hang.answered:
        # at loading, or at another's request before our first
        say(f"error: the engine died{ended_by(output.died)} before it was ready")
    return End(code, lambda: output.told_to_end)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Have a server end by itself: it frees what is shared between its processes."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            say("it does not end: ending it")


def tell(words: str, *, given_up: bool = False) -> None:
    """Tell the health check how far the server is."""
    try:
        state.write(state.State(words, given_up))
    except OSError as error:
        say(f"warning: the health check cannot be told: {error}")


class _Warming(threading.Thread):
    """A warm-up or a trial at work; the supervisor attends to the server meanwhile."""

    def __init__(self, work: Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.problem = ""

    def run(self) -> None:
        try:
            self.problem = self._work()
        except Exception as error:  # it is told, and counts as any failure of the warm-up
            self.problem = f"{type(error).__name__}: {error}"


class _Attendant:
    """Looks after a server that runs, until there is a reason to end."""

    def __init__(self, plan: Plan, child: subprocess.Popen[bytes], output: _Output) -> None:
        self.plan, self.child, self.output = plan, child, output
        self.start = time.monotonic()
        looks_s = 0.0 if plan.client is None else plan.client.timeout_s
        # the last look takes its time, too: all of it is to be over within hang_s
        self.hang = Hang(plan.hang_s, spare_s=looks_s)
        self.asked = self.told_ready = self.by_itself = False
        self.ended: int | None = None
        self._before: Counters | None = None
        self._warming: _Warming | None = None

    def run(self) -> int:
        """Return the exit code, once the server has ended or is to be ended."""
        plan, next_look = self.plan, self.start
        while True:
            try:
                code = self.child.wait(0.5)
            except subprocess.TimeoutExpired:
                pass
            else:
                self.ended = code
                asked_for_help = {"-h", "--help"} & {one.partition("=")[0] for one in plan.command}
                if code == 0 and not self.output.told_to_end and not asked_for_help:
                    # so does vLLM after the death of its engine, and nothing restarts a success
                    self.by_itself = True
                    return EX_TEMPFAIL
                return code if code >= 0 else 128 - code
            if plan.guard is not None and plan.guard.look(time.monotonic()):
                return EX_OSERR
            if self.output.problems and not _tolerated(plan, self.output.problems):
                return EX_CONFIG
            if plan.link is not None:
                if why := plan.link.problem():
                    say(f"{why}: ending this half, to be started anew with the other")
                    return EX_TEMPFAIL
                if plan.client is None and not self.told_ready and plan.link.peer_serves():
                    self.told_ready = True
                    plan.at_ready()
            now = time.monotonic()
            if plan.trial and now - self.start > plan.trial_s:
                say(f"error: no result within {plan.trial_s:.0f} s (SPARKFORGE_PREFLIGHT_SECONDS)")
                return EX_CONFIG
            if self._warming is not None and not self._warming.is_alive():
                if plan.trial:
                    if self._warming.problem:
                        say(f"error: {self._warming.problem}")
                    return EX_CONFIG if self._warming.problem else 0
                if not _warmed(plan, self._warming.problem):
                    return EX_CONFIG
                self._ready(now)
                self._warming, next_look = None, now
            if plan.client is None or self._warming is not None or now < next_look:
                continue
            if (verdict := self._look(plan.client, now)) is not None:
                return verdict
            # while it loads a look is cheap, and the backends are to be known when Docker says
            # healthy
            next_look = time.monotonic() + (plan.every_s if self.hang.answered else 1)

    def died_at_first_token(self) -> bool:
        """Tell whether the server ended by itself when it had been asked, before it answered."""
        waited = self.asked and not self.hang.answered
        return waited and self.ended is not None and not self.output.told_to_end

    def _look(self, client: Client, now: float) -> int | None:
        """Ask the server; returns the exit code where it is to be ended."""
        try:
            self._before = client.observe(self._before)
        except Exception as error:  # whatever it answers: it ends no server, and is a failed look
            self.asked = self.asked or isinstance(error, NoTokenError)
            return self._failed(error)
        if not self.hang.answered:
            say(
                f"first token after {now - self.start:.0f} s; backends: {_shown(self.output.watch)}"
            )
            if self.plan.trial:
                self._warming = _Warming(self.plan.trial)
                self._warming.start()
                self.hang.well(now)
                return None
            if not _tolerated(self.plan, self.output.watch.missing()):
                return EX_CONFIG
            self.plan.at_ready()
            if self.plan.link is not None:
                self.plan.link.serving()
            if self.plan.warm_up:
                self._warming = _Warming(self.plan.warm_up.run)
                self._warming.start()
            else:
                self.plan.when_ready()
        elif self.plan.warm_up:
            self.plan.warm_up.look()
        self.hang.well(now)
        return None

    def _failed(self, error: Exception) -> int | None:
        names = {one.name for one in session(self.child.pid)}
        if self.hang.answered and _COMPILERS & names:
            say("no progress, but a compiler is at work: waiting for it")
            self.hang.excused(time.monotonic())
        elif self.hang.ill(time.monotonic()) and self.child.poll() is None:
            say(f"the server hangs: {type(error).__name__}: {error}")
            say(f"no progress for {self.plan.hang_s:.0f} s: ending it, to be started anew")
            for one in session(self.child.pid):
                say(f"  {one.pid} {one.name}: state {one.state}, waits in {one.waits_in}")
            return EX_TEMPFAIL
        return None

    def _ready(self, now: float) -> None:
        say(f"ready after {now - self.start:.0f} s")
        self.plan.when_ready()


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
