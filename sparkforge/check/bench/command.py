"""``build.py bench``: measure servers by llama-benchy, compare two results."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import cached, composing, serve
from sparkforge.build.graph import Build, unpatched_environment
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    VariantOptions,
    command_options,
)
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product
from sparkforge.build.serve import CHAT_OPTIONS, chat_model, runs_python
from sparkforge.build.setup import last_build
from sparkforge.build.smoke import (
    SMOKE_VARIABLES,
    UNPATCHED_VARIABLES,
    of_release,
    originals,
    start_server,
)
from sparkforge.build.stages import thirdparty
from sparkforge.check.bench import benchy
from sparkforge.check.bench.benchy import METRICS, TABLES, Call, Result
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
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.store.store import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
TOLERANCE = 3.0
"""Smallest change that counts, in percent."""


@command_options
class RunOptions:
    """Options of ``bench``."""

    target: str
    """target to measure"""
    url: str | None = None
    """measure this server, http://HOST:PORT (default: start the last build)"""
    vs: Literal["unpatched"] | None = None
    """measure the unpatched release too, in the same session, rounds in turns"""
    profile_table: Annotated[str, Parameter(choices=tuple(TABLES))] = "seeds"
    """what to measure: quick, seeds or community (default: seeds)"""
    quick: bool = False
    """short for --profile-table quick"""
    runs: PositiveInt = 3
    """runs of each test (default: 3); with --vs rounds"""
    model: Path | None = None
    """folder of the checkpoint; with --url, of its tokenizer.json (default: a tiny model with
    canned replies)"""
    profile: str | None = None
    """exact, balanced or fast: format of the dense layers; with --url, that of the running server
    (default: the target's)"""
    skip_coherence: bool = False
    """do not ask the model a simple question first"""
    out: Path | None = None
    """new folder for the result (default: dist/TARGET/bench/TIME-TABLE)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


@command_options
class CompareOptions:
    """Options of ``bench compare``."""

    a: Path = field(kw_only=False)
    """the earlier result: a folder of `bench`, or its result.json"""
    b: Path = field(kw_only=False)
    """the later one"""
    tolerance: NonNegativeFloat = TOLERANCE
    """smallest change that counts, in percent (default: 3)"""
    output: OutputOptions = OutputOptions()


def run(options: RunOptions) -> int:
    """Measure the speed of a server."""
    name = "quick" if options.quick else options.profile_table
    if options.url is not None and (options.vs or options.arguments):
        msg = "--vs and arguments after -- are for a server that bench starts, not for --url"
        raise UsageError(msg, "omit them")
    project = Project.open(options.project)
    no_tiny = project.pins.target(options.target).smoke is None
    if options.model is None and (options.url is not None or no_tiny):
        msg = "there is no tiny model for this: no checkpoint, or no tokenizer.json"
        raise UsageError(msg, "name the model's folder with --model DIR")
    place = None
    if options.url is not None:
        place = client.place_of(composing.seen(project.root / ".env"), options.url)
    out = options.out or new_folder(project.root / "dist" / options.target / "bench", name)
    out = out.absolute()  # llama-benchy has another current folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists already", "name a new folder")
    tool, version = thirdparty.install(project, project.root / benchy.LOCK, "llama-benchy")
    text = benchy.text_for(project.root)
    common = {
        "target": options.target,
        "machine": _machine(),
        "table": name,
        "tool": f"llama-benchy {version}",
        "text": hashlib.sha256(text.encode()).hexdigest(),
    }
    rounds, runs = (options.runs, 1) if options.vs else (1, options.runs)
    with project.store.temporary("bench") as work:
        if place is not None and options.model is not None:
            known = {"origin": "url", "profile": options.profile or ""}
            sides = [Side("", options.model, lambda: nullcontext(place), known)]
        else:
            build = last_build(
                project, options.target, options.variant, options.server, options.arguments
            )
            profile = build.context.serving
            if options.profile is not None:
                profile = serve.chosen(build.context, options.profile)
            model = None if options.model is None else serve.checkpoint(options.model)
            build.run("image")
            sides = of_build(build, model, profile, work, versus=options.vs is not None)
        call = Call(
            tool / "bin" / "python", work / "home", (*TABLES[name].split(), "--runs", str(runs))
        )
        call.prepare(text)
        coherent = not options.skip_coherence and options.model is not None
        results = measure(sides, common, call, rounds, out, coherent=coherent)
    document: dict[str, Any] = {"results": [plain.as_json(one) for one in results.values()]}
    document["folders"] = [str(out / name) for name in results]
    for name, result in results.items():
        log.heading(f"{name or 'result'}: {out / name}")
        log.table(benchy.table(result))
    if len(results) == 2:
        a, b = results.values()
        changes = benchy.compare(a, b, TOLERANCE / 100)
        document["comparison"] = {"changes": changes}
        log.heading("B, patched, compared with A, unpatched")
        log.table(_table(changes))
    log.document(document)
    return 0


def measure(
    sides: Sequence[Side],
    common: dict[str, Any],
    call: Call,
    rounds: int,
    out: Path,
    *,
    coherent: bool,
) -> dict[str, Result]:
    """Measure servers in rounds that take turns; returns the results by side."""
    results = {}
    for side in sides:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        identity = {**common, **side.identity}
        identity["options"] = redacted(identity.get("options", ()))  # results are also for others
        results[side.name] = Result(started, identity)
    for number in range(rounds):
        # A B, B A, …: drift over time affects both
        for side in sides if number % 2 == 0 else reversed(sides):
            result, folder = results[side.name], out / side.name
            file = folder / f"llama-benchy-{number + 1}.json"
            folder.mkdir(parents=True, exist_ok=True)
            title = f"{side.name or 'server'}, round {number + 1} of {rounds}"
            with log.step(title), side.start() as place:
                model = client.served_model(place).name
                call.run(place, model, side.model, file, coherent=coherent and number == 0)
            result.identity["model"] = model
            result.add(file)
            result.save(folder)
    return results


# -- servers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A server to measure; ``start`` yields when it is ready."""

    name: str
    """Of its folder below the result's."""
    model: Path
    """Folder with its tokenizer.json."""
    start: Callable[[], AbstractContextManager[Place]]
    identity: Mapping[str, Any]


@contextmanager
def started(
    build: Build,
    product: Artefact[Product],
    launch: Launch,
    work: Path,
    restored: Mapping[str, Path] | None = None,
) -> Iterator[Place]:
    """Start a build's server, and yield its place when it is ready."""
    folder = Path(tempfile.mkdtemp(prefix="server-", dir=work))
    cache, engine = build.context.store.cache_path("serve"), build.tools.engine
    with (
        start_server(engine, product, launch, folder, cache, restored) as server,
        kept_log(server, build.context.server_log),
    ):
        took = wait_ready(server, max(build.serving.ready_timeout_s, _LOAD_S))
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
    arguments: Sequence[str] = build.serving.arguments
    variables = {"SPARKFORGE_PROFILE": profile.choice} if built and profile.choice else {}
    tiny = model is None
    if tiny:
        arguments = (*CHAT_OPTIONS, *arguments)
        variables |= SMOKE_VARIABLES
    bare = of_release(options), of_release(arguments)
    if tiny and versus:
        options, arguments = bare
        if built:
            variables |= instead(options)  # the image's own do not fit the BF16 model
    model, gpus = model or _tiny(build, wide=versus), context.target.cuda_arch is not None
    ours = Launch(model, options, arguments, variables, build.serving.port, gpus)
    pins = sha256_file(context.pins_path)

    def side(
        name: str,
        product: Artefact[Product],
        launch: Launch,
        known: Mapping[str, Any],
        restored: Mapping[str, Path] | None = None,
    ) -> Side:
        start = partial(started, build, product, launch, work, restored)
        served = {"options": [*launch.options, *launch.arguments], "checkpoint": launch.model.name}
        return Side(name, launch.model, start, {**known, **served, "pins": pins})

    known = {
        "origin": "build",
        "release": context.release,
        "wheels": {item.result.file: item.result.sha256 for item in build.graph.own},
        "image": (built.digest or built.image_id) if built else "",
        "profile": profile.choice or "",
    }
    patched = side("patched" if versus else "", product, ours, known)
    if not versus:
        return [patched]
    theirs = replace(
        ours, options=bare[0], arguments=bare[1], variables={**variables, **UNPATCHED_VARIABLES}
    )
    version = context.pins.upstream(next(iter(context.target.wheels))).version
    known = {"origin": "release", "release": version}
    if built:
        folder = Path(tempfile.mkdtemp(prefix="originals-", dir=work))
        restored = originals(context, build.graph.wheels, build.graph.trees, folder)
        return [side("unpatched", product, theirs, known, restored), patched]
    item = unpatched_environment(context)
    cached.run(context, cached.ordered([item]))
    return [side("unpatched", item.artefact, theirs, known), patched]


def _tiny(build: Build, *, wide: bool) -> Path:
    """Return the tiny checkpoint for chats, in MXFP4, or with ``wide`` in BF16."""
    folder = build.context.dist
    model = chat_model(folder, runs_python(build.tools.engine, build.graph.product.artefact))
    if not wide:
        return model
    return made(folder / "tiny-chat-model-bf16", lambda new: expand(model, new))


# -- results -----------------------------------------------------------------------------


def _machine() -> str:
    """Return this machine in words: CPU, cores, and GPUs with their driver."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    cpu = re.search(r"(?m)^model name\s*: (.+)$", text)  # arm64 has none
    query = ("--format=csv,noheader", "--query-gpu=name,driver_version")
    gpus = glimpse("nvidia-smi", *query, timeout_s=20).out.split("\n")
    words = [platform.machine(), cpu[1] if cpu else "", f"{os.cpu_count()} cores", *gpus]
    return "; ".join(filter(None, words))


def new_folder(parent: Path, name: str) -> Path:
    """Return a new folder's path, named after the time."""
    return parent / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"


def _table(changes: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a comparison as rows of text, the head first."""
    rows: list[tuple[str, ...]] = [("test", "metric", "A", "B", "B / A", "5 % to 95 %", "verdict")]
    for one in changes:
        spread = f"{one['low']:.3f} to {one['high']:.3f}" if one["high"] else "too few runs"
        values = (f"{one['a']:.2f}", f"{one['b']:.2f}", f"{one['ratio']:.3f}", spread)
        rows.append((one["name"], METRICS[one["metric"]][1], *values, one["verdict"]))
    return rows


def compare_results(options: CompareOptions) -> int:
    """Compare two results; CheckError if the second is slower."""
    a, b = benchy.load(options.a), benchy.load(options.b)
    names = ("machine", "tool", "text", "target", "model", "profile", "options")
    differs = [name for name in names if a.identity.get(name) != b.identity.get(name)]
    changes = benchy.compare(a, b, options.tolerance / 100)
    if differs:
        log.warning(f"these differ, too: {', '.join(differs)}")
    log.document({"changes": changes, "differs": differs})
    log.table(_table(changes))
    slower = [f"{one['name']}: {one['metric']}" for one in changes if one["verdict"] == "slower"]
    if not slower:
        return 0
    hint = "find the cause with build.py ablate --bisect, or allow more with --tolerance"
    return log.failure(CheckError(f"B is slower than A: {'; '.join(slower)}", hint))
