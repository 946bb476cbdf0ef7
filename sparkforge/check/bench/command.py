"""``build.py bench``: measure servers by llama-benchy, compare two results."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import composing, image, serve, smoke
from sparkforge.build.graph import Build, last_build
from sparkforge.build.options import OutputOptions, ServingOptions, command_options
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product
from sparkforge.build.stages import thirdparty
from sparkforge.check.bench import benchy
from sparkforge.check.bench.benchy import TABLES, Call, Change, Result
from sparkforge.checkpoints.tiny import expand
from sparkforge.core import plain
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.runtime.client import Place
from sparkforge.runtime.servers import Launch, instead, kept_log, wait_ready
from sparkforge.serving.options import redacted
from sparkforge.serving.profile import Profile
from sparkforge.sources.project import Project
from sparkforge.store.store import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
Restored = Mapping[str, Path] | None
"""Files of the release by their path below site-packages, which an image serves instead of ours."""
_TOLERANCE = 3.0  # percent: the smallest change that counts


@command_options
class RunOptions(ServingOptions):
    target: str | None = None
    """target whose last build to measure"""
    url: str | None = None
    """measure this server, http://HOST:PORT (default: start the last build)"""
    vs: Literal["unpatched"] | None = None
    """measure the unpatched release too, in the same session, rounds in turns"""
    table: Annotated[str, Parameter(choices=tuple(TABLES))] = "seeds"
    """what to measure: quick, seeds or community (default: seeds)"""
    runs: PositiveInt = 3
    """runs of each test (default: 3); with --vs rounds"""
    model: Path | None = None
    """folder of the checkpoint; with --url, of its tokenizer.json (default: a tiny model with
    canned replies)"""
    profile: str | None = None
    """exact, balanced, fast or fastest: format of the dense layers; with --url, that of the running
    server (default: the target's)"""


@command_options
class CompareOptions:
    a: Path = field(kw_only=False)
    """the earlier result: a folder of `bench`, or its result.json"""
    b: Path = field(kw_only=False)
    """the later one"""
    tolerance: NonNegativeFloat = _TOLERANCE
    """smallest change that counts, in percent (default: 3)"""
    output: OutputOptions = OutputOptions()


@dataclass(frozen=True)
class Side:
    """A server to measure; ``start`` yields when it is ready."""

    name: str  # of its folder below the result's
    model: Path  # the folder with its tokenizer.json
    start: Callable[[], AbstractContextManager[Place]]
    identity: Mapping[str, Any]


def run(options: RunOptions = RunOptions()) -> int:
    """Measure the speed of a server."""
    log.document(measured(options))
    return 0


def measured(options: RunOptions) -> dict[str, Any]:
    """Measure the speed of a server; returns and keeps the results."""
    own = options.url is None  # a server that bench starts
    if (own and options.target is None) or (not own and (options.vs or options.arguments)):
        msg = "bench needs --target NAME, or --url without --vs and arguments after --"
        raise UsageError(msg, "build.py bench run --help")
    # absolute: llama-benchy runs in another folder
    project, model = Project.open(options.project), options.model and options.model.resolve()
    no_tiny = options.target is None or project.pins.target(options.target).smoke is None
    if model is None and (no_tiny or not own):
        msg = "there is no tiny model for this: no checkpoint, or no tokenizer.json"
        raise UsageError(msg, "name the model's folder with --model DIR")
    place = None if own else client.place_of(composing.seen(project.root / ".env"), options.url)
    tool, version = thirdparty.install(project, project.root / benchy.LOCK, "llama-benchy")
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = glimpse("nvidia-smi", *query, timeout_s=20).out.splitlines()
    machine = "; ".join([platform.machine(), f"{os.cpu_count()} cores", *gpus])
    common = {"machine": machine, "table": options.table, "tool": f"llama-benchy {version}"}
    rounds, runs = (options.runs, 1) if options.vs else (1, options.runs)
    out = new_folder(project.root / "dist" / (options.target or ""), options.table)
    with project.store.temporary("bench") as work:
        if place is not None and model is not None:
            known = {"origin": "url", "profile": options.profile or ""}
            sides = [Side("", model, lambda: nullcontext(place), known)]
        else:
            target = str(options.target)
            build = last_build(project, target, options.variant, options.server, options.arguments)
            profile = serve.chosen(build.context, options.profile)
            checkpoint = None if model is None else serve.checkpoint(model)
            build.run("image")
            sides = of_build(build, checkpoint, profile, work, versus=options.vs is not None)
        words = (*TABLES[options.table].split(), "--runs", str(runs))
        # Often enough for the longest prompt, of 100,000 tokens. A router's choice of experts
        # depends on the words, so all results have one text.
        text = (project.root / "LICENSE").read_text(encoding="utf-8") * 200
        real = model is not None and (own or no_tiny)
        call = Call(tool / "bin" / "python", work / "home", words, text, real)
        results = measure(sides, common, call, rounds, out)
    document: dict[str, Any] = {"folders": [str(out / name) for name in results]}
    document["results"] = [plain.as_json(one) for one in results.values()]
    for name, result in results.items():
        log.heading(f"{name or 'result'}: {out / name}")
        log.table(benchy.table(result))
        if why := benchy.doubt(result):
            log.warning(f"these figures may mislead: {why}")
    if len(results) == 2:
        a, b = results.values()
        changes = benchy.compare(a, b, _TOLERANCE / 100)
        document["changes"] = list(map(asdict, changes))
        log.heading("B, patched, compared with A, unpatched")
        log.table(_table(changes))
    return document


def measure(
    sides: Sequence[Side], common: Mapping[str, Any], call: Call, rounds: int, out: Path
) -> dict[str, Result]:
    """Measure servers in rounds that take turns; returns the results by side."""
    results = {side.name: Result({**common, **side.identity}) for side in sides}
    for number in range(rounds):
        # A B, B A, …: drift over time affects both
        for side in sides if number % 2 == 0 else reversed(sides):
            result, folder = results[side.name], out / side.name
            file = folder / f"llama-benchy-{number + 1}.json"
            folder.mkdir(parents=True, exist_ok=True)
            title = f"{side.name or 'server'}, round {number + 1} of {rounds}"
            with log.step(title), side.start() as place:
                model = client.served_model(place).name
                call.run(place, model, side.model, file)
            result.identity["model"] = model
            result.add(file)
            result.save(folder)
    return results


@contextmanager
def started(
    build: Build, product: Artefact[Product], launch: Launch, work: Path, restored: Restored = None
) -> Iterator[Place]:
    """Start a build's server, and yield its place when it is ready."""
    folder = Path(tempfile.mkdtemp(prefix="server-", dir=work))
    cache, engine = build.context.store.cache_path("serve"), build.tools.engine
    with (
        smoke.start_server(engine, product, launch, folder, cache, restored) as server,
        kept_log(server, build.context.dist / "server.log"),
    ):
        took = wait_ready(server, max(build.tools.ready_timeout_s, _LOAD_S))
        log.info(f"the server is ready after {took:.0f} s")
        yield Place(f"{server.url}/v1")


def of_build(
    build: Build, model: Path | None, profile: Profile, work: Path, *, versus: bool
) -> list[Side]:
    """Return the sides of a build: with ``versus`` its release first, then the build.

    The release gets the same options, except for those that only the patches have. Of the tiny
    model (None) both get a copy in BF16, since the release refuses MXFP4 on most CPUs.
    """
    context, product = build.context, build.graph.product.artefact
    built = product.result if isinstance(product.result, ImageResult) else None
    options: Sequence[str] = context.serve_with(profile)
    arguments: Sequence[str] = build.tools.arguments
    variables = {"SPARKFORGE_PROFILE": profile.choice} if built and profile.choice else {}
    tiny = model is None
    if tiny:
        arguments = (*serve.CHAT_OPTIONS, *arguments)
        variables |= smoke.SMOKE_VARIABLES
    bare = smoke.of_release(options), smoke.of_release(arguments)
    if tiny and versus:
        options, arguments = bare
        if built:
            variables |= instead(options)  # the image's own do not fit the BF16 model
    if model is None:
        model = serve.chat_model(context.dist, serve.runs_python(build.tools.engine, product))
        if versus:
            model = made(context.dist / "tiny-chat-model-bf16", partial(expand, model))
    gpus = context.target.cuda_arch is not None
    ours = Launch(model, options, arguments, variables, build.tools.port, gpus)
    known: dict[str, Any] = {
        "origin": "build",
        "release": context.release,
        "wheels": {item.result.file: item.result.sha256 for item in build.graph.own},
        "image": (built.digest or built.image_id) if built else "",
        "profile": profile.choice or "",
    }
    restored: Restored = None
    sides = [("patched" if versus else "", product, ours, known, restored)]
    if versus:
        variables = {**variables, **smoke.UNPATCHED_VARIABLES}
        theirs = replace(ours, options=bare[0], arguments=bare[1], variables=variables)
        version = context.pins.upstream(next(iter(context.target.wheels))).version
        known = {"origin": "release", "release": version}
        if built:
            folder = Path(tempfile.mkdtemp(prefix="originals-", dir=work))
            restored = smoke.originals(context, build.graph.wheels, folder)
        else:
            product = image.unpatched(context)
        sides.insert(0, ("unpatched", product, theirs, known, restored))
    result = []
    for name, product, launch, known, restored in sides:
        words = redacted((*launch.options, *launch.arguments))  # results are also for others
        known |= {"target": context.target_name, "checkpoint": model.name, "options": words}
        known["pins"] = sha256_file(context.pins_path)
        start = partial(started, build, product, launch, work, restored)
        result.append(Side(name, model, start, known))
    return result


def new_folder(dist: Path, name: str) -> Path:
    """Return a new folder for a result, named after the time."""
    return dist / "bench" / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"


def _table(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("test", "A", "B", "B / A", "5 % to 95 %", "verdict")]
    for one in changes:
        spread = f"{one.low:.3f} to {one.high:.3f}" if one.high else "too few runs"
        values = (f"{one.a:.2f}", f"{one.b:.2f}", f"{one.ratio:.3f}", spread)
        rows.append((one.name, *values, one.verdict))
    return rows


def compare_results(options: CompareOptions) -> int:
    """Compare two results; CheckError if the second is slower."""
    a, b = benchy.load(options.a), benchy.load(options.b)
    names = ("machine", "tool", "target", "model", "profile", "options")
    differs = [name for name in names if a.identity.get(name) != b.identity.get(name)]
    changes = benchy.compare(a, b, options.tolerance / 100)
    if differs:
        log.warning(f"these differ, too: {', '.join(differs)}")
    log.document({"changes": list(map(asdict, changes)), "differs": differs})
    log.table(_table(changes))
    slower = [one.name for one in changes if one.verdict == "slower"]
    if not slower:
        return 0
    hint = "find the cause: git bisect run; or allow more with --tolerance"
    return log.failure(CheckError(f"B is slower than A: {'; '.join(slower)}", hint))
