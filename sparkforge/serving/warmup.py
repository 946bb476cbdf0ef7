"""Make a server compile its kernels before it counts as healthy, so that no user waits for them.

The full warm-up runs once for a build, a device and a way to start the server. A record lists the
files that the caches gained. Later starts run a short warm-up, and the full one again if anything
was compiled. While users are served, further compilations are logged and recorded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from sparkforge.serving import answers, record, steps
from sparkforge.serving.cachefiles import kernels
from sparkforge.serving.caches import Caches
from sparkforge.serving.document import Document
from sparkforge.serving.progress import PROBLEMS, Client, StatusError
from sparkforge.serving.record import Made, Record
from sparkforge.serving.steps import Request, Shape, Step

_SHOWN = 5  # kernels named in one line of the log
_DEATH_S = 5.0  # a server ends within this time after its engine, and logs the reason
_LOOK_EVERY_S = 10.0
_ASK_S = 5.0
# Prompts are counted when their answer is complete; those of longer answers stay unknown.
_ANSWERED_WITHIN_S = 60.0
_OUR_OWN = 10  # tokens; our own checks are in these buckets


class _OverError(Exception):
    """The time limit is reached."""


@dataclass
class WarmUp:
    """The warm-up of one server."""

    client: Client
    shape: Shape
    """Of the server; its own ``max_len`` has priority."""
    mode: str
    """``quick`` or ``full``."""
    limit_s: float
    """For all steps; the rest is skipped."""
    say: Callable[[str], None]
    tell: Callable[[str], None]
    """Passes progress to the health check."""
    caches: Caches | None = None
    """Folder of compiled kernels; None: unknown, and nothing is recorded."""
    way: str = "default"
    """Part of the record's file name, for this way to start a server."""
    answers: bool = False
    """The model has to answer a question at the end, outside of ``limit_s``."""
    _known: set[str] = field(default_factory=set)
    _before: set[str] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)
    _accepted: set[str] = field(default_factory=set)
    _record: Record | None = None
    _claim: ExitStack = field(default_factory=ExitStack)
    _prompts: dict[str, float] = field(default_factory=dict)
    _next_look: float = 0.0
    _ended: int = 0
    _looked: bool = False
    _served: bool = False
    _waiting: _Late | None = None

    def begin(self) -> None:
        """List the files of the caches; call it before the server starts."""
        if self.caches is None:
            return
        self._claim.enter_context(self.caches.warming())
        self._before = self.caches.files()
        self._known = set(self._before)
        self._record = Record.load(self.caches.folder / f"warm-up-{self.way}.json")

    def run(self) -> str:
        """Send the requests to a server that has answered once; returns the problem, or "".

        A request that the server refuses (status 4xx) is one that users cannot make either, and is
        only logged.
        """
        start = time.monotonic()
        made: list[Made] = []
        why = outcome = digest = wrong = name = ""
        try:
            start_up = self._gained()
            made.append(Made("start of the server", 0.0, len(start_up), kernels(start_up)))
            model = self.client.model(time.monotonic() + _ASK_S)
            name = model.name
            shape = self.shape = replace(self.shape, max_len=model.max_len or self.shape.max_len)
            more = sorted(self._record.lengths) if self._record else []
            digest = steps.digest(shape)
            why = self._reason(digest, start_up)
            whole = steps.full(shape, more)
            if not why:
                short = steps.quick(shape, more)
                self._steps(short, model.name, start, made)
                if self.mode == "full" and any(step.compiled for step in made):
                    why = "something was compiled"
            if why:
                self.say(f"warm-up: in full: {why}")
                self._steps(whole, model.name, start, made)
        except _OverError as over:
            self.say(f"warning: warm-up: {over}; later requests may wait for a compiler")
            outcome = "time"
        except PROBLEMS as error:
            if not isinstance(error, StatusError):
                time.sleep(_DEATH_S)
            outcome = f"{made[-1].name}: {type(error).__name__}: {error}"
        if self._record is not None and why:
            self._record.steps, self._record.complete = digest, not outcome
        if self.answers and outcome in ("", "time"):
            wrong = self._answers(name, made)
        self._close(start, made, wrong or outcome)
        return wrong or ("" if outcome == "time" else outcome)

    def _answers(self, model: str, made: list[Made]) -> str:
        """Let the model answer a question; returns the problem, or ""."""
        self.tell("warm-up: a question to the model")
        began = time.monotonic()
        problem = answers.check(self.client, model, self.shape.max_len, self.say)
        gained = self._gained()
        seconds = round(time.monotonic() - began, 3)
        made.append(Made("answers", seconds, len(gained), kernels(gained), problem))
        return problem

    def _reason(self, digest: str, start_up: set[str]) -> str:
        """Return the reason why the full warm-up is needed, or ""."""
        if self.mode == "quick":
            return ""
        if self._record is None or self.caches is None:
            return "no folder for a record"
        present = {self.caches.shown(path) for path in self._known}
        why = self._record.lacks(digest, present)
        return why or ("the server compiled something while it started" if start_up else "")

    def _steps(self, todo: list[Step], model: str, start: float, made: list[Made]) -> None:
        over = f"its {self.limit_s:.0f} s are over"
        for number, step in enumerate(todo, start=1):
            began = time.monotonic()
            left = start + self.limit_s - began
            note = f"warm-up {number}/{len(todo)}: {step.name}"
            if left <= 0:
                raise _OverError(f"{over} before step {number} of {len(todo)}, {step.name}")
            # if an endpoint refuses its plainest request, users cannot use it
            possible = [request for request in step.requests if request.path not in self._refused]
            if not possible:
                continue
            self.tell(note)
            done = Made(step.name, 0.0)
            made.append(done)
            try:
                self._send(possible, model, start + self.limit_s)
            except StatusError as error:
                if error.status // 100 != 4:
                    raise
                done.problem = f"refused: {error}"
                self._refused |= {request.path for request in possible} - self._accepted
            except TimeoutError:
                raise _OverError(f"{over} in step {number} of {len(todo)}, {step.name}") from None
            else:
                self._accepted |= {request.path for request in possible}
            finally:
                gained = self._gained()
                done.seconds = round(time.monotonic() - began, 3)
                done.compiled, done.kernels = len(gained), kernels(gained)
            words = f", {done.compiled} files: {_shown(done.kernels)}" if done.compiled else ""
            words += f"; {done.problem}" if done.problem else ""
            self.say(f"{note}: {done.seconds:.1f} s{words}")

    def _send(self, requests: Sequence[Request], model: str, end: float) -> None:
        """Send requests together; raises the first failure, once all have ended."""
        with ThreadPoolExecutor(len(requests), "warm-up") as pool:
            sent = [pool.submit(self._send_one, request, model, end) for request in requests]
        errors = [error for future in sent if (error := future.exception()) is not None]
        refused = [
            error for error in errors if isinstance(error, StatusError) and error.status // 100 == 4
        ]
        for error in errors:
            # in a batch of all kinds some may be refused, and each has been logged by itself
            if error not in refused or len(refused) == len(sent):
                raise error

    def _send_one(self, request: Request, model: str, end: float) -> None:
        salt = f"warm-up {time.monotonic_ns()}"  # or the prefix cache would shorten the prompt
        body = {"cache_salt": salt, **request.body, "model": model}
        answer = self.client.ask(end, "POST", request.path, body)
        if body.get("stream") and b'data: {"error"' in answer:
            text = answer[answer.index(b'{"error"') :].partition(b"\n")[0]
            code = (
                Document.parse(f"the error of {request.path}", text).get(dict, "error").get("code")
            )
            shown = f"POST {request.path}: {text[:200].decode(errors='replace')}"
            raise StatusError(code if isinstance(code, int) else 500, shown)

    def _gained(self) -> set[str]:
        """Return the new files of the caches since the last call."""
        if self.caches is None:
            return set()
        present = self.caches.files()
        gained = present - self._known
        self._known |= present
        return gained

    def _close(self, start: float, made: list[Made], outcome: str) -> None:
        seconds = time.monotonic() - start
        if self._record is not None and self.caches is not None:
            gained = sorted(self.caches.shown(path) for path in self._known - self._before)
            run = {
                "when": record.now(),
                "seconds": round(seconds, 1),
                "outcome": outcome or "well",
                "compiled": len(gained),
                "steps": [step.document() for step in made],
            }
            self._record.add_run(run, gained)
            self._save()
            self._claim.close()
        self._served = True
        if not outcome:
            count = sum(step.compiled for step in made[1:])
            growth = f"; the caches gained {count} files" if self.caches else ""
            self.say(f"warm-up: {len(made) - 1} steps in {seconds:.0f} s{growth}")

    def _save(self) -> None:
        assert self._record is not None
        try:
            if self.caches is not None:
                self.caches.settle()  # first: a record of kernels that a power cut empties is wrong
            self._record.save()
        except OSError as error:
            self.say(f"warning: {self._record.path} cannot be written: {error}")

    # -- while users are served --------------------------------------------------------------

    def look(self) -> None:
        """Log and record new files of the caches since the last call."""
        now = time.monotonic()
        if self.caches is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        self._look(now)

    def _look(self, now: float) -> None:
        try:
            self._watch(now)
        except OSError as error:  # the folder or its disk is gone: no reason to end a server
            self.say(f"warning: compiled kernels are no longer watched: {error}")
            self.caches = None

    def _watch(self, now: float) -> None:
        assert self.caches is not None
        prompts = self._answered()
        gained = self._gained()
        # no user waits for what another server compiles in its warm-up
        ended = self.caches.last_warm_up()
        elsewhere = ended == 0 or (self._looked and ended != self._ended)
        self._looked, self._ended = True, ended
        if gained and not elsewhere:
            names = kernels(gained)
            self.say(f"warning: a request waited for a compiler: {_shown(names)}")
            if self._waiting is None:
                self._waiting = _Late(now + _ANSWERED_WITHIN_S)
            self._waiting.kernels += names
            self._waiting.files += sorted(self.caches.shown(path) for path in gained)
        if self._waiting is not None:
            self._waiting.lengths |= self._grown(prompts)
            if now >= self._waiting.until:
                self._note()
        self._prompts = prompts

    def end(self) -> None:
        """Record the last new files; call it when the server has ended."""
        if self.caches is not None and self._served:
            self._look(time.monotonic())
        self._note()

    def _note(self) -> None:
        late, self._waiting = self._waiting, None
        if late is None or self._record is None:
            return
        self._record.add_late(late.kernels, late.files, late.lengths)
        self._save()
        lengths = ", ".join(str(length) for length in sorted(late.lengths)) or "unknown"
        self.say(f"later warm-ups will include prompts of these lengths: {lengths} tokens")

    def _answered(self) -> dict[str, float]:
        try:
            return self.client.prompts(time.monotonic() + _ASK_S)
        except PROBLEMS:
            return self._prompts  # the supervisor reports a server that does not answer

    def _grown(self, prompts: dict[str, float]) -> set[int]:
        grown = (bucket for bucket, n in prompts.items() if n > self._prompts.get(bucket, 0))
        sizes = {int(min(float(bucket), self.shape.max_len)) for bucket in grown}
        return {size for size in sizes if size > _OUR_OWN}


@dataclass
class _Late:
    """Files compiled while users waited, until ``until`` of the monotonic clock."""

    until: float
    kernels: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)


def _shown(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def way(words: Iterable[str]) -> str:
    """Return a short digest of a way to start a server, for the record's file name."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
