"""``build.py bench``: measure servers by llama-benchy, compare two results."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import composing, serve
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    VariantOptions,
    host_platform,
)
from sparkforge.build.setup import last_build
from sparkforge.check.bench import benchy, sides
from sparkforge.check.bench.benchy import METRICS, TABLES, Call, Result
from sparkforge.check.bench.sides import Side
from sparkforge.core import plain
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import glimpse
from sparkforge.runtime import client
from sparkforge.serving.options import redacted
from sparkforge.sources.project import Project, ProjectOptions

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
            servers = sides.of_build(build, model, profile, work, versus=options.vs is not None)
            model = model or sides.standing_in(build)  # the BF16 one's tokenizer, too
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
