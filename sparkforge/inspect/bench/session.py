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
"""Of a test; on two cores with five busy processes about one in ten gave no speed of decode."""


@dataclass(frozen=True)
class Side:
    """A server to measure.

    Attributes:
        name: of its folder; "" for that of the run.
        start: starts it, and yields when it is ready.
        ours: we start its process.
    """

    name: str
    start: Callable[[], AbstractContextManager[Asked]]
    identity: Identity
    ours: bool


@dataclass(frozen=True)
class Plan:
    """The plan of a run: tests, rounds and tools.

    Attributes:
        runs: of each test in a round.
        rounds: of each side.
        together: the sides' servers run at the same time; else each starts for its round.
        words: the text; None: generated.
        tokenizer: returns a folder with a ``tokenizer.json`` for a server's model.
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
class _Measurement:
    """One side's results so far, and their guard."""

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
    """Return a server's description of its model.

    Raises:
        BenchError: no OpenAI server answers, or it lacks the model.
    """
    url = f"{asked.url}/v1/models"
    try:
        reply = _look(asked, "/v1/models")
    except (OSError, ValueError) as error:  # also for an invalid host
        msg = f"{asked.url}: no server answers ({type(error).__name__})"
        raise BenchError(msg, "start one, or fix --url: http://HOST:PORT") from None
    if reply.status in (401, 403):
        msg = f"{asked.url}: {reply.status}, it wants an API key"
        raise BenchError(msg, "name the file that has the key with --api-key-file FILE")
    try:
        models = list(reply.json()["data"])
        names = [str(model["id"]) for model in models]
    except (LookupError, TypeError, ValueError):
        msg = f"{url}: {reply.status}, not the list of an OpenAI server"
        raise BenchError(msg, "fix --url: http://HOST:PORT") from None
    if not names or (asked.model and asked.model not in names):
        msg = f"{asked.url} serves {', '.join(names) or 'no model'}"
        raise BenchError(f"{msg}, not {asked.model}" if asked.model else msg, "fix --served-model")
    found: Mapping[str, Any] = models[names.index(asked.model) if asked.model else 0]
    return found


def version(asked: Asked) -> str:
    """Return a server's version, or ""; only vLLM's has that address."""
    try:
        return f"vLLM {_look(asked, '/version').json()['version']}"
    except (OSError, LookupError, TypeError, ValueError):
        return ""


def run(sides: Sequence[Side], plan: Plan, folder: Path, work: Path) -> list[Result]:
    """Measure; return the results in the order of the sides.

    Args:
        folder: of the results; it always has them up to the last completed test.
        work: a folder for temporary files.

    Raises:
        BenchError: a server does not answer as expected.
        SmokeError: a server does not start.
    """
    tests = list(plan.table.tests())
    words = plan.words or text.generate(text.enough(max(test.tokens for test in tests)))
    home = work / "home"
    benchy.prepare(home, words)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    session = str(uuid.uuid4())
    measurements = [
        _Measurement(
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
                # results are also for others
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
        for measurement in measurements if plan.together else ():
            running[measurement.side.name] = stack.enter_context(measurement.side.start())
        for number in range(plan.rounds):
            # A B, B A, …: drift over time affects both
            for measurement in measurements if number % 2 == 0 else reversed(measurements):
                if plan.together:
                    _round(measurement, running[measurement.side.name], plan, tests, number, home)
                    continue
                if measurement.side.ours:
                    measurement.guard.before_start()
                with measurement.side.start() as asked:
                    _round(measurement, asked, plan, tests, number, home)
    for measurement in measurements:
        measurement.write(complete=True)
    return [measurement.result for measurement in measurements]


def _round(
    measurement: _Measurement,
    asked: Asked,
    plan: Plan,
    tests: Sequence[Test],
    number: int,
    home: Path,
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
        measurement.result.identity, model=asked.model, context=context, server=version(asked)
    )
    logs = measurement.folder / "llama-benchy" / f"round-{number + 1}"
    logs.mkdir(parents=True, exist_ok=True)
    measurement.rounds.append([])
    common = Call(plan.tool, tokenizer, home, plan.runs, plan.table.prefix_caching, plan.coherent)
    what = f"{measurement.side.name or 'server'}, round {number + 1} of {plan.rounds}"
    with log.step(what):
        for at, test in enumerate(tests):
            measurement.guard.quiet(f"before {test.name}")
            with measurement.guard.during(test.name):
                found = _measured(common, asked, test, logs)
            measurement.rounds[-1] += found
            # the question is about the model: the first test is enough
            common = replace(common, coherent=False)
            measurement.write(identity=identity, rounds=number + 1)
            said = ", ".join(
                f"{samples.METRICS[sampled.metric]} {sampled.mean:.1f}"
                for sampled in found
                if not sampled.context
            )
            log.info(f"{at + 1} of {len(tests)}  {test.name}: {said}")
        measurement.guard.quiet("at the end")


def _measured(common: Call, asked: Asked, test: Test, logs: Path) -> list[Samples]:
    """Return the samples of a test, from the first attempt with a speed of decode.

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
