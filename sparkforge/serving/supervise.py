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

from sparkforge.serving import compilers, plugin, state
from sparkforge.serving.backends import SENTENCES, Watch
from sparkforge.serving.cluster import Link
from sparkforge.serving.door import Door
from sparkforge.serving.errors import EX_CONFIG, EX_OSERR, EX_TEMPFAIL
from sparkforge.serving.guard import Guard
from sparkforge.serving.hang import Hang
from sparkforge.serving.log import say
from sparkforge.serving.output import Output
from sparkforge.serving.progress import Client, Counters, NoTokenError
from sparkforge.serving.session import computed_s, ended_by, kill, session, start
from sparkforge.serving.warmup import WarmUp

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S = 30.0
_COMPUTES = 0.05  # of one core, during a check: a busy machine has no more for it


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
    warm_up: WarmUp | None = None
    """Runs at the first answer, before the server counts as healthy."""
    warm_strict: bool = True
    """End the server when the warm-up fails; else warn."""
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
        self._before = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}

    def _pass_on(self, number: int, frame: object) -> None:
        self.came = True
        if self._child.poll() is None:
            self._child.send_signal(number)

    def restore(self) -> None:
        """Put back the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run(plan: Plan) -> End:
    """Run the server to its end.

    The exit code is the server's own; 128 + N after signal N; 75 after a hang, and where the server
    ends with 0 without a signal; 78 after a wrong backend; 71 where memory ran short.
    """
    if plan.guard is not None:
        plan.guard.begin()
    state.tell("preflight" if plan.trial else "loading" if plan.warm_up else state.READY)
    if plan.warm_up:
        plan.warm_up.begin()
    child = start(plugin.for_plugin(plan.command), plan.variables)
    assert child.stdout is not None
    output = Output(Watch(plan.expected))
    signals = _Signals(child)
    supervisor = _Supervisor(plan, child, output, signals)
    reader = threading.Thread(target=output.copy, args=(child.stdout.fileno(),), daemon=True)
    reader.start()
    try:
        code = supervisor.run()
        if plan.trial:
            _terminate(child)
    finally:
        kill(child.pid)  # with all processes that the server may have left
        child.wait()
        if plan.warm_up:
            plan.warm_up.end()
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


def _terminate(child: subprocess.Popen[bytes]) -> None:
    """Let a server end by itself: it frees what its processes share."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            say("the server does not end: killing it")


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
        self._computed_s = 0.0

    def run(self) -> int:
        """Return the exit code, once the server has ended or has to end."""
        plan, next_look = self.plan, self.start
        while True:
            try:
                code = self.child.wait(0.5)
            except subprocess.TimeoutExpired:
                pass
            else:
                return self._ended(code)
            if plan.entrance is not None and plan.entrance.died:
                return EX_TEMPFAIL
            if plan.guard is not None and plan.guard.look(time.monotonic()):
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
            now = time.monotonic()
            if plan.trial and now - self.start > plan.trial_s:
                say(f"error: no result within {plan.trial_s:.0f} s (SPARKFORGE_PREFLIGHT_SECONDS)")
                return EX_CONFIG
            if self._background is not None and not self._background.is_alive():
                if plan.trial:
                    if self._background.problem:
                        say(f"error: {self._background.problem}")
                    return EX_CONFIG if self._background.problem else 0
                if not _warmed(plan, self._background.problem):
                    return EX_CONFIG
                plan.when_ready()
                say(f"ready after {now - self.start:.0f} s")
                self._background, next_look = None, now
            if plan.client is None or self._background is not None or now < next_look:
                continue
            if (verdict := self._look(plan.client, now)) is not None:
                return verdict
            # while the server loads a check is cheap, and the backends have to be known when Docker
            # reports healthy
            next_look = time.monotonic() + (plan.every_s if self.hang.answered else 1)

    def report_death(self) -> None:
        """Log the reason of the server's end, if it ended by itself."""
        if self.by_itself:
            say("error: the server ended by itself; its output above says why")
        waited = self.asked and not self.hang.answered
        if waited and self.ended is not None and not self.signals.came:
            died = self.ended if self.output.died is None else self.output.died
            say(f"error: the engine died{ended_by(died)} while answering the first token")
        elif self.output.died is not None and not self.hang.answered:
            # while loading, or at another client's request before our first
            say(f"error: the engine died{ended_by(self.output.died)} before it was ready")

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
        self._computed_s = computed_s(self.child.pid)
        try:
            self._before = client.observe(self._before)
        except Exception as error:  # any wrong answer is a failed check, and ends nothing by itself
            self.asked = self.asked or isinstance(error, NoTokenError)
            return self._failed(error)
        if not self.hang.answered:
            say(
                f"first token after {now - self.start:.0f} s; backends: {_shown(self.output.watch)}"
            )
            if self.plan.trial:
                self._run_in_background(self.plan.trial)
                self.hang.well(now)
                return None
            if not _tolerated(self.plan, self.output.watch.missing()):
                return EX_CONFIG
            self.plan.at_first_token()
            if self.plan.link is not None:
                self.plan.link.serving()
            if self.plan.warm_up:
                self._run_in_background(self.plan.warm_up.run)
            else:
                self.plan.when_ready()
        elif self.plan.warm_up:
            self.plan.warm_up.look()
        self.hang.well(now)
        self._tell(stalled=False)
        return None

    def _tell(self, *, stalled: bool) -> None:
        if stalled != self._stalled:
            self._stalled = stalled
            if self.plan.entrance is not None:
                self.plan.entrance.stall(stalled)

    def _run_in_background(self, work: Callable[[], str]) -> None:
        self._background = _Background(work)
        self._background.start()

    def _failed(self, error: Exception) -> int | None:
        if self.hang.answered:
            self._tell(stalled=True)
        names = {process.name for process in session(self.child.pid)}
        if self.hang.answered and compilers.PROGRAMS & names:
            # a kernel that is built at its first use holds up the engine for minutes; a server
            # ended now would build it again at the next start, and again
            say("no progress, but a compiler is running: waiting for it")
            self.hang.excused(time.monotonic())
        elif self._hangs(error, time.monotonic()) and self.child.poll() is None:
            say(f"the server hangs: {type(error).__name__}: {error}")
            say("no progress: ending it, to be restarted")
            for process in session(self.child.pid):
                say(
                    f"  {process.pid} {process.name}: state {process.state}, waits in"
                    f" {process.waits_in}"
                )
            return EX_TEMPFAIL
        return None

    def _hangs(self, error: Exception, now: float) -> bool:
        """Note a failed check; returns whether the server hangs.

        The engine is a process of its own. A server that answers nothing and computes meanwhile may
        be busy with one client's request, so it gets more time.
        """
        computes = computed_s(self.child.pid) - self._computed_s > _COMPUTES * self.hang.spare_s
        if computes and isinstance(error, TimeoutError):
            say("no answer, but the server computes: waiting for what may be one slow request")
            return self.hang.slow(now)
        return self.hang.ill(now)


def _warmed(plan: Plan, problem: str) -> bool:
    """Log the problem of a warm-up; returns whether the server may serve."""
    if problem:
        say(f"{'error' if plan.warm_strict else 'warning'}: warm-up failed: {problem}")
        if plan.warm_strict:
            say("to serve anyway: SPARKFORGE_WARM_UP_FAILURE=warn")
            return False
    state.tell(state.READY)
    return True


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
