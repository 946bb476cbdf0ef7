"""A run: servers, tests in rounds, and the result, written after each test."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.core.errors import BenchError
from sparkforge.core.log import log
from sparkforge.inspect.bench import benchy, pictures, samples, text
from sparkforge.inspect.bench.benchy import Asked, Call, Tool
from sparkforge.inspect.bench.guard import Guard
from sparkforge.inspect.bench.result import Ceiling, Identity, Machine, Result, save
from sparkforge.inspect.bench.samples import Samples
from sparkforge.inspect.bench.tables import Table, Test
from sparkforge.runtime import client
from sparkforge.runtime.client import Place, Reply
from sparkforge.serving.access import redacted

_ANSWER_S = 30.0
_ATTEMPTS = 5
"""Of a test; on two cores with five busy processes about one in ten had no speed of decode."""


@dataclass(frozen=True)
class Side:
    """A server to measure.

    Attributes:
        name: of its folder; "" for that of the run.
        start: starts it, and yields when it is ready.
        ours: it is a process that we start.
    """

    name: str
    start: Callable[[], AbstractContextManager[Asked]]
    identity: Identity
    ours: bool


@dataclass(frozen=True)
class Plan:
    """What to measure, and with what.

    Attributes:
        runs: of each test in a round.
        rounds: of each side.
        together: the sides' servers run at the same time; else each is started for its round.
        words: the text, or None: made here.
        tokenizer: folder with a ``tokenizer.json``; None: asked of the server.
        coherent: ask each server a simple question first.
    """

    table_name: str
    table: Table
    tool: Tool
    runs: int
    rounds: int
    together: bool
    words: str | None
    tokenizer: Callable[[Mapping[str, Any]], Path]
    coherent: bool
    machine: Machine
    ceilings: Callable[[Iterable[Test]], tuple[Ceiling, ...]]


@dataclass
class _Kept:
    """One side's results so far, and what guards them."""

    side: Side
    folder: Path
    guard: Guard
    result: Result
    rounds: list[list[Samples]] = field(default_factory=list)

    def write(self, **changes: Any) -> None:
        joined = samples.joined(self.rounds)
        disturbed = tuple(self.guard.disturbed)
        self.result = replace(self.result, samples=joined, disturbed=disturbed, **changes)
        pictures.draw(self.result, self.folder)
        save(self.result, self.folder)


def _look(asked: Asked, path: str) -> Reply:
    return client.look(Place(f"{asked.url}/v1", asked.key), path, _ANSWER_S)


def described(asked: Asked) -> Mapping[str, Any]:
    """Return what a server says of its model.

    Raises:
        BenchError: no OpenAI server answers there, or it lacks the model.
    """
    url = f"{asked.url}/v1/models"
    try:
        reply = _look(asked, "/v1/models")
    except (OSError, ValueError) as error:  # or the name of no host
        msg = f"{asked.url}: no server answers ({type(error).__name__})"
        raise BenchError(msg, "start one, or fix --url: http://HOST:PORT") from None
    if reply.status in (401, 403):
        msg = f"{asked.url}: {reply.status}, it wants an API key"
        raise BenchError(msg, "name the file that has the key with --api-key-file FILE")
    try:
        models = list(reply.json()["data"])
        names = [str(one["id"]) for one in models]
    except (LookupError, TypeError, ValueError):
        msg = f"{url}: {reply.status}, not the list of an OpenAI server"
        raise BenchError(msg, "fix --url: http://HOST:PORT") from None
    if not names or (asked.model and asked.model not in names):
        msg = f"{asked.url} serves {', '.join(names) or 'no model'}"
        raise BenchError(f"{msg}, not {asked.model}" if asked.model else msg, "fix --served-model")
    found: Mapping[str, Any] = models[names.index(asked.model) if asked.model else 0]
    return found


def version(asked: Asked) -> str:
    """Return what a server says of its version, or ""; only vLLM's has that address."""
    try:
        return f"vLLM {_look(asked, '/version').json()['version']}"
    except (OSError, LookupError, TypeError, ValueError):
        return ""


def run(sides: Sequence[Side], plan: Plan, folder: Path, work: Path) -> list[Result]:
    """Measure; returns the results in the order of the sides.

    Args:
        folder: of the results; it has them up to the last test that ended, whatever happens.
        work: a folder for temporary files.

    Raises:
        BenchError: a server does not answer as it should.
        SmokeError: one does not start.
    """
    tests = list(plan.table.tests())
    words = plan.words or text.generate(text.enough(max(test.tokens for test in tests)))
    home = work / "home"
    benchy.prepare(home, words)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    session = str(uuid.uuid4())
    kept = [
        _Kept(
            side,
            folder / side.name,
            Guard(ours=side.ours),
            Result(
                session=session,
                started=started,
                table=plan.table_name,
                rounds=0,
                complete=False,
                disturbed=(),
                tool=plan.tool.version,
                lock=plan.tool.lock,
                text=hashlib.sha256(words.encode()).hexdigest(),
                # results are for others, too
                identity=replace(side.identity, options=tuple(redacted(side.identity.options))),
                machine=plan.machine,
                ceilings=plan.ceilings(tests),
                samples=(),
            ),
        )
        for side in sides
    ]
    with ExitStack() as stack:
        running: dict[str, Asked] = {}
        for one in kept if plan.together else ():
            running[one.side.name] = stack.enter_context(one.side.start())
        for number in range(plan.rounds):
            # A B, B A, …: what drifts with time meets both
            for one in kept if number % 2 == 0 else reversed(kept):
                if plan.together:
                    _round(one, running[one.side.name], plan, tests, number, home)
                    continue
                if one.side.ours:
                    one.guard.before_start()
                with one.side.start() as asked:
                    _round(one, asked, plan, tests, number, home)
    for one in kept:
        one.write(complete=True)
    return [one.result for one in kept]


def _round(
    one: _Kept, asked: Asked, plan: Plan, tests: Sequence[Test], number: int, home: Path
) -> None:
    """Measure all tests of one side once."""
    model = described(asked)
    asked = replace(asked, model=str(model["id"]))
    context = model.get("max_model_len")
    context = context if isinstance(context, int) else 0
    longest = max(tests, key=lambda test: test.tokens)
    if 0 < context < longest.tokens:
        msg = f"{longest.name} needs {longest.tokens:,} tokens; the server takes {context:,}"
        raise BenchError(msg, "choose another --profile-table, or raise --max-model-len")
    tokenizer = plan.tokenizer(model)
    benchy.check_tokenizer(tokenizer)
    identity = replace(
        one.result.identity, model=asked.model, context=context, server=version(asked)
    )
    logs = one.folder / "llama-benchy" / f"round-{number + 1}"
    logs.mkdir(parents=True, exist_ok=True)
    one.rounds.append([])
    common = Call(plan.tool, tokenizer, home, plan.runs, plan.table.prefix_caching, plan.coherent)
    what = f"{one.side.name or 'server'}, round {number + 1} of {plan.rounds}"
    with log.step(what):
        for at, test in enumerate(tests):
            one.guard.quiet(f"before {test.name}")
            with one.guard.during(test.name):
                found = _measured(common, asked, test, logs)
            one.rounds[-1] += found
            # the question is for the first test: it is about the model
            common = replace(common, coherent=False)
            one.write(identity=identity, rounds=number + 1)
            said = ", ".join(
                f"{samples.METRICS[each.metric]} {each.mean:.1f}"
                for each in found
                if not each.context
            )
            log.info(f"{at + 1} of {len(tests)}  {test.name}: {said}")
        one.guard.quiet("at the end")


def _measured(common: Call, asked: Asked, test: Test, logs: Path) -> list[Samples]:
    """Return the samples of a test, of the first attempt that has a speed of decode.

    vLLM joins the tokens that wait for its front end. On a busy machine a short answer of a small
    model can be one piece, which has no speed.
    """
    for _ in range(_ATTEMPTS):
        found = samples.read(benchy.measure(common, asked, test, logs), test)
        if samples.decoded(found):
            return found
        log.info(f"{test.name}: no answer came in more than one piece")
    tried = f"no decode speed after {_ATTEMPTS} attempts"
    msg = f"{test.name}: {tried}: every answer arrived in one piece"
    raise BenchError(msg, f"see {logs / test.slug}.log, and the server's")
