"""``build.py bench``: measure servers by llama-benchy, compare two results."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import cached, composing, serve
from sparkforge.build.graph import Build, unpatched_environment
from sparkforge.build.launcher import (
    CHAT_OPTIONS,
    SMOKE_VARIABLES,
    UNPATCHED_VARIABLES,
    chat_model,
    of_release,
    originals,
    runs_python,
    start_server,
)
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    VariantOptions,
    host_platform,
)
from sparkforge.build.publish import made
from sparkforge.build.results import ImageResult, Product
from sparkforge.build.setup import last_build
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
from sparkforge.runtime.servers import Launch, Server, instead, kept_log, wait_ready
from sparkforge.serving.options import redacted
from sparkforge.serving.profile import Profile
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.store.store import Artefact

_LOAD_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
TOLERANCE = 3.0
"""Smallest change that counts, in percent."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
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
    chosen = project.pins.target(options.target)
    if options.model is None and (options.url is not None or chosen.smoke is None):
        msg = "there is no tiny model for this: no checkpoint, or no tokenizer.json"
        raise UsageError(msg, "name the model's folder with --model DIR")
    text, table = benchy.text_for(project.root, TABLES[name]), TABLES[name]
    variables = composing.seen(project.root / ".env")
    place = client.place_of(variables, options.url) if options.url is not None else None
    out = options.out or new_folder(project.root / "dist" / options.target / "bench", name)
    out = out.absolute()  # llama-benchy has another current folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists already", "name a new folder")
    python, version = benchy.install(project.store, project.root, host_platform(), project.access)
    common = {
        "target": options.target,
        "machine": _machine(),
        "table": name,
        "tool": f"llama-benchy {version}",
        "text": hashlib.sha256(text.encode()).hexdigest(),
    }
    more = ["--runs", "1" if options.vs else str(options.runs)]
    more += ["--enable-prefix-caching"] if name == "community" else []
    with project.store.temporary("bench") as work:
        model = options.model
        if place is not None and model is not None:
            known = {"origin": "url", "profile": options.profile or ""}
            servers = [Side("", lambda: nullcontext(place), known)]
        else:
            build = last_build(
                project, options.target, options.variant, options.server, options.arguments
            )
            profile = build.context.serving
            if options.profile is not None:
                profile = serve.chosen(build.context, options.profile)
            model = None if model is None else serve.checkpoint(model)
            build.run("image")
            servers = of_build(build, model, profile, work, versus=options.vs is not None)
            model = model or standing_in(build)  # the BF16 one's tokenizer, too
        call = Call(python, model, work / "home", table, more)
        call.prepare(text)
        coherent = not options.skip_coherence and options.model is not None
        # two models do not fit into one GPU
        together = options.vs is not None and chosen.cuda_arch is None
        rounds = options.runs if options.vs else 1
        results = measure(servers, common, call, rounds, out, together=together, coherent=coherent)
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
    servers: Sequence[Side],
    common: dict[str, Any],
    call: Call,
    rounds: int,
    out: Path,
    *,
    together: bool,
    coherent: bool,
) -> dict[str, Result]:
    """Measure servers in rounds, at the same time or in turns; returns the results by side."""
    results = {}
    for side in servers:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        identity = {**common, **side.identity}
        identity["options"] = redacted(identity.get("options", ()))  # results are also for others
        results[side.name] = Result(started, identity)
    with ExitStack() as all_of_them:
        places = {}
        if together:
            places = {one.name: all_of_them.enter_context(one.start()) for one in servers}
        for number in range(rounds):
            # A B, B A, …: drift over time affects both
            for side in servers if number % 2 == 0 else reversed(servers):
                file = out / side.name / f"llama-benchy-{number + 1}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                title = f"{side.name or 'server'}, round {number + 1} of {rounds}"
                with log.step(title), ExitStack() as this_one:
                    place = places.get(side.name) or this_one.enter_context(side.start())
                    model = client.served_model(place).name
                    call.run(place, model, file, coherent=coherent and number == 0)
                result = results[side.name]
                result.identity["model"] = model
                result.add(file)
                result.save(out / side.name)
    return results


# -- servers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A server to measure, with the name of its folder; ``start`` yields when it is ready."""

    name: str
    start: Callable[[], AbstractContextManager[Place]]
    identity: Mapping[str, Any]


@contextmanager
def started(
    build: Build,
    product: Artefact[Product],
    launch: Launch,
    work: Path,
    restored: Mapping[str, Path] | None = None,
) -> Iterator[Server]:
    """Start a build's server, and yield it when it is ready."""
    folder = work / f"server-{len(list(work.iterdir()))}"
    folder.mkdir()
    cache, engine = build.context.store.cache_path("serve"), build.tools.engine
    with (
        start_server(engine, product, launch, folder, cache, restored) as server,
        kept_log(server, build.context.server_log),
    ):
        took = wait_ready(server, max(build.serving.ready_timeout_s, _LOAD_S))
        log.info(f"the server is ready after {took:.0f} s")
        yield server


def of_build(
    build: Build, model: Path | None, profile: Profile, work: Path, *, versus: bool
) -> list[Side]:
    """Return the sides of a build: with ``versus`` its release first, then the build.

    The release gets the same options, except for those that only the patches have. Of the tiny
    model (None) both get a copy in BF16, since the release refuses MXFP4 on most CPUs.
    """
    context, serving, product = build.context, build.serving, build.graph.product.artefact
    built = product.result if isinstance(product.result, ImageResult) else None
    tiny, plain = model is None, versus and model is None
    options = tuple(context.serve_with(profile))
    usual = (*(CHAT_OPTIONS if tiny else ()), *serving.arguments)
    bare = tuple(of_release(options)), tuple(of_release(usual))
    variables = dict(SMOKE_VARIABLES) if tiny else {}
    more = {}
    if built is not None and plain:
        more = instead(bare[0])  # the image's own do not fit the BF16 model
    elif built is not None and profile.choice:
        more = {"SPARKFORGE_PROFILE": profile.choice}
    launch = Launch(
        model or standing_in(build, wide=versus),
        *(bare if plain else (options, usual)),
        {**variables, **more},
        0 if versus else serving.port,
        gpus=context.target.cuda_arch is not None,
    )

    def side(
        name: str,
        product: Artefact[Product],
        launch: Launch,
        restored: Any = None,
        **known: Any,
    ) -> Side:
        @contextmanager
        def start() -> Iterator[Place]:
            with started(build, product, launch, work, restored) as server:
                yield Place(f"{server.url}/v1")

        known |= {"options": [*launch.options, *launch.arguments], "checkpoint": launch.model.name}
        return Side(name, start, {**known, "pins": sha256_file(context.pins_path)})

    wheels = [item.result for item in build.graph.own]
    ours = {
        "origin": "build",
        "release": context.release,
        "wheels": {wheel.file: wheel.sha256 for wheel in wheels},
        "image": (built.digest or built.image_id) if built is not None else "",
        "profile": profile.choice or "",
    }
    patched = side("patched" if versus else "", product, launch, **ours)
    if not versus:
        return [patched]
    variables |= UNPATCHED_VARIABLES
    launch = replace(launch, options=bare[0], arguments=bare[1], variables=variables)
    version = context.pins.upstream(next(iter(context.target.wheels))).version
    theirs = {"origin": "release", "release": version}
    if built is not None:
        graph, folder = build.graph, work / "originals"
        folder.mkdir()
        restored = originals(context, graph.wheels, graph.trees, folder)
        return [side("unpatched", product, launch, restored, **theirs), patched]
    item = unpatched_environment(context)
    cached.run(context, cached.ordered([item]))
    return [side("unpatched", item.artefact, launch, **theirs), patched]


def standing_in(build: Build, *, wide: bool = False) -> Path:
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
    if not options.output.json:
        log.table(_table(changes))
    slower = [f"{one['name']}: {one['metric']}" for one in changes if one["verdict"] == "slower"]
    if not slower:
        return 0
    hint = "find the cause with build.py ablate --bisect, or allow more with --tolerance"
    return log.failure(CheckError(f"B is slower than A: {'; '.join(slower)}", hint))
