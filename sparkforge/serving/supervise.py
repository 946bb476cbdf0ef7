"""Run the server as a child: pass on its output and our signals, and end it when it hangs.

Docker marks a container unhealthy and leaves it running; it restarts what *ends*. So a server that
has answered once and then makes no progress for ``hang_s`` is killed, and Docker's restart policy
restarts the container. While it loads, however long, nothing is killed.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkforge.serving import arguments, processes, state
from sparkforge.serving.backends import SENTENCES, Output, Watch
from sparkforge.serving.cluster import Link
from sparkforge.serving.door import Door
from sparkforge.serving.errors import EX_CONFIG, EX_OSERR, EX_TEMPFAIL, say
from sparkforge.serving.guard import Guard
from sparkforge.serving.progress import Client, Counters, Hang, NoTokenError

_GRACE_S = 30.0
_COMPUTES = 0.05  # of one core, during a check: a busy machine has no more for it
_COMPILERS = frozenset(
    ("ninja", "nvcc", "cicc", "ptxas", "ptxas-blackwell", "nvlink", "gcc", "g++", "cc1plus", "ld")
)
"""Names of compilers' processes."""


@dataclass(frozen=True)
class Plan:
    """The server to run, and how to supervise it."""

    command: Sequence[str]
    """With our plugin's options as users write them."""
    variables: Mapping[str, str]
    expected: Mapping[str, str]
    """Backends that vLLM has to choose, by kind."""
    client: Client | None
    """Sends our own requests; None: this server takes none."""
    strict: bool = True
    """End the server when it chooses another backend; else warn."""
    hang_s: float = 60.0
    """Seconds without progress, after the first answer, until it is killed; 0: never."""
    every_s: float = 5.0
    """Seconds between two checks of a server that has answered."""
    at_first_token: Callable[[], None] = lambda: None
    """Called once, at the first answer."""
    when_ready: Callable[[], None] = lambda: None
    """Called once, when users are served: after the warm-up, where there is one."""
    warm_up: Callable[[], str] | None = None
    """Runs at the first answer, before the server counts as healthy; returns the problem, or ""."""
    trial: Callable[[], str] | None = None
    """Runs at the first answer instead of serving users; returns the problem, or "". Then the
    server ends, with exit code 0 or 78."""
    trial_s: float = 1800.0
    """Seconds for the whole trial, from the start of the server."""
    link: Link | None = None
    """To the other of two machines; None: this one serves alone."""
    guard: Guard | None = None
    """Of memory; None: off."""
    entrance: Door | None = None
    """The front door; None: this server takes no requests."""


@dataclass(frozen=True)
class End:
    """The end of a server."""

    code: int
    """Exit code for this process."""
    stopped: Callable[[], bool] = lambda: False
    """A signal has come for the server by now."""


class _Signals:
    """Passes signals on to the server."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.came = False
        self._before = {number: signal.signal(number, self._pass_on) for number in state.SIGNALS}

    def _pass_on(self, number: int, frame: object) -> None:
        self.came = True
        if self._child.poll() is None:
            self._child.send_signal(number)

    def restore(self) -> None:
        """Put back the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Background(threading.Thread):
    """A warm-up or a trial, while the supervisor checks the server."""

    def __init__(self, work: Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.problem = ""

    def run(self) -> None:
        try:
            self.problem = self._work()
        except Exception as error:  # counts as any failure of the warm-up, and is logged
            self.problem = f"{type(error).__name__}: {error}"


def run(plan: Plan) -> End:
    """Run the server to its end.

    The exit code is the server's own; 128 + N after signal N; 75 after a hang, and where the server
    ends with 0 without a signal; 78 after a wrong backend; 71 where memory ran short.
    """
    if plan.guard is not None:
        plan.guard.begin()
    state.tell("preflight" if plan.trial else "loading" if plan.warm_up else state.READY)
    child = processes.start(arguments.for_plugin(plan.command), plan.variables)
    assert child.stdout is not None
    output = Output(Watch(plan.expected))
    signals = _Signals(child)
    supervisor = _Supervisor(plan, child, output, signals)
    reader = threading.Thread(target=output.copy, args=(child.stdout.fileno(),), daemon=True)
    reader.start()
    try:
        code = supervisor.run()
        if plan.trial and child.poll() is None:
            child.terminate()  # by itself it frees what its processes share
            try:
                child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                say("the server does not end: killing it")
    finally:
        processes.kill(child.pid)  # with all processes that the server may have left
        child.wait()
        if plan.link is not None:
            plan.link.close()
    reader.join(5)
    if plan.trial:
        signals.restore()  # a download and another server follow
        # only now: a line may come after the answer
        problems = [*output.problems, *output.watch.missing()]
        if code == 0 and not signals.came and not _tolerated(plan, problems):
            code = EX_CONFIG
    supervisor.report_death()
    return End(code, lambda: signals.came)


class _Supervisor:
    """Checks a running server, until there is a reason to end it."""

    def __init__(
        self, plan: Plan, child: subprocess.Popen[bytes], output: Output, signals: _Signals
    ) -> None:
        self.plan, self.child, self.output, self.signals = plan, child, output, signals
        self.start = time.monotonic()
        # the last check takes time, too, and has to end within hang_s
        self.hang = Hang(plan.hang_s, spare_s=0.0 if plan.client is None else plan.client.timeout_s)
        self.asked = self.peer_answered = self.by_itself = False
        self.ended: int | None = None
        self._before: Counters | None = None
        self._background: _Background | None = None
        self._stalled = False

    def run(self) -> int:
        """Return the exit code, once the server has ended or has to end."""
        plan, next_look = self.plan, self.start
        while True:
            try:
                return self._ended(self.child.wait(0.5))
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if (verdict := self._around(now)) is not None:
                return verdict
            if self._background is not None and not self._background.is_alive():
                problem = self._background.problem
                if problem:
                    what = "" if plan.trial else "warm-up failed: "
                    say(f"error: {what}{problem}")
                    return EX_CONFIG
                if plan.trial:
                    return 0
                self._ready()
                self._background, next_look = None, now
            if plan.client is None or self._background is not None or now < next_look:
                continue
            if (verdict := self._look(plan.client, now)) is not None:
                return verdict
            # while the server loads a check is cheap, and the backends have to be known when Docker
            # reports healthy
            next_look = time.monotonic() + (plan.every_s if self.hang.answered else 1)

    def _around(self, now: float) -> int | None:
        """Check all but the server's progress; returns the exit code where it has to end."""
        plan = self.plan
        if plan.entrance is not None and plan.entrance.died:
            return EX_TEMPFAIL
        if plan.guard is not None and plan.guard.look(now):
            return EX_OSERR
        if self.output.problems and not _tolerated(plan, self.output.problems):
            return EX_CONFIG
        if plan.link is not None:
            if reason := plan.link.problem():
                say(f"{reason}: ending this half, to restart with the other")
                return EX_TEMPFAIL
            if plan.client is None and not self.peer_answered and plan.link.peer_serves():
                self.peer_answered = True
                plan.at_first_token()
        if plan.trial and now - self.start > plan.trial_s:
            say(f"error: no result within {plan.trial_s:.0f} s")
            return EX_CONFIG
        return None

    def _ready(self) -> None:
        state.tell(state.READY)
        self.plan.when_ready()
        say(f"ready after {time.monotonic() - self.start:.0f} s")

    def report_death(self) -> None:
        """Log the reason of the server's end, if it ended by itself."""
        if self.by_itself:
            say("error: the server ended by itself; its output above says why")
        if self.hang.answered or self.signals.came:
            return
        died = self.output.died
        if self.asked and self.ended is not None:
            ended = ended_by(self.ended if died is None else died)
            say(f"error: the engine died{ended} while answering the first token")
        elif died is not None:  # while loading, or at another client's request before our first
            say(f"error: the engine died{ended_by(died)} before it was ready")

    def _ended(self, code: int) -> int:
        """Return our exit code for the server's own."""
        self.ended = code
        help_wanted = {"-h", "--help"} & {word.partition("=")[0] for word in self.plan.command}
        if code == 0 and not self.signals.came and not help_wanted:
            # vLLM ends so after the death of its engine, and Docker restarts no success
            self.by_itself = True
            return EX_TEMPFAIL
        return code if code >= 0 else 128 - code

    def _look(self, client: Client, now: float) -> int | None:
        """Check the server; returns the exit code where it has to end."""
        plan, computed_s = self.plan, processes.computed_s(self.child.pid)
        try:
            self._before = client.observe(self._before)
        except Exception as error:  # any wrong answer is a failed check, and ends nothing by itself
            self.asked = self.asked or isinstance(error, NoTokenError)
            return self._failed(error, processes.computed_s(self.child.pid) - computed_s)
        first = not self.hang.answered
        self.hang.well(now)
        self._tell(stalled=False)
        if not first:
            return None
        say(f"first token after {now - self.start:.0f} s; backends: {_shown(self.output.watch)}")
        work = plan.trial or plan.warm_up
        if not plan.trial:
            if not _tolerated(plan, self.output.watch.missing()):
                return EX_CONFIG
            plan.at_first_token()
            if plan.link is not None:
                plan.link.serving()
        if work is None:
            self._ready()
        else:
            self._background = _Background(work)
            self._background.start()
        return None

    def _tell(self, *, stalled: bool) -> None:
        if stalled != self._stalled and self.plan.entrance is not None:
            self.plan.entrance.stall(stalled)
        self._stalled = stalled

    def _failed(self, error: Exception, computed_s: float) -> int | None:
        """Note a failed check; returns the exit code where the server hangs.

        Args:
            computed_s: seconds that the API server, a process beside the engine, has computed.
        """
        if not self.hang.answered:
            return None
        self._tell(stalled=True)
        running, now = processes.session(self.child.pid), time.monotonic()
        if _COMPILERS & {process.name for process in running}:
            # a kernel that is built at its first use holds up the engine for minutes; a server
            # ended now would build it again at the next start, and again
            say("no progress, but a compiler is running: waiting for it")
            self.hang.excused(now)
            return None
        if isinstance(error, TimeoutError) and computed_s > _COMPUTES * self.hang.spare_s:
            say("no answer, but the server computes: waiting for what may be one slow request")
            hangs = self.hang.slow(now)
        else:
            hangs = self.hang.ill(now)
        if not hangs or self.child.poll() is not None:
            return None
        say(f"the server hangs: {type(error).__name__}: {error}")
        say("no progress: ending it, to be restarted")
        for one in running:
            say(f"  {one.pid} {one.name}: state {one.state}, waits in {one.waits_in}")
        return EX_TEMPFAIL


def ended_by(code: int | None) -> str:
    """Describe an exit code, or a signal's number below zero; "" for 0 and None."""
    if not code:
        return ""
    try:
        return f" (exit code {code})" if code > 0 else f" ({signal.Signals(-code).name})"
    except ValueError:
        return f" (signal {-code})"


def _tolerated(plan: Plan, problems: list[str]) -> bool:
    """Log and clear problems with the backends; returns whether the server may continue."""
    for problem in problems:
        say(f"{'error' if plan.strict else 'warning'}: {problem}")
    if problems and plan.strict:
        say("to serve anyway: SPARKFORGE_BACKEND_CHECK=warn")
        return False
    problems.clear()
    return True


def _shown(watch: Watch) -> str:
    seen = [(kind, watch.seen[kind]) for kind in SENTENCES if kind in watch.seen]
    return ", ".join(f"{kind} {'/'.join(sorted(names))}" for kind, names in seen) or "unknown"
