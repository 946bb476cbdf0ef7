"""`build.py bench`: servers, tests in rounds, and the result, written after each test."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import serve
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    VariantOptions,
    host_platform,
)
from sparkforge.build.setup import last_build
from sparkforge.check.bench import benchy, result, session, sides
from sparkforge.check.bench.result import Identity
from sparkforge.check.bench.session import Measurement
from sparkforge.core import plain
from sparkforge.core.errors import CheckError, ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime import client
from sparkforge.sources.project import Project, ProjectOptions


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
    profile_table: Annotated[str | None, Parameter(choices=tuple(benchy.TABLES))] = None
    """what to measure: quick, seeds or community (default: seeds)"""
    quick: bool = False
    """short for --profile-table quick"""
    runs: PositiveInt = 3
    """runs of each test (default: 3); with --vs rounds"""
    model: Path | None = None
    """folder of the checkpoint; with --url, of its tokenizer.json (default: a tiny model with
    canned replies; with --url, where the server or the hub's cache has it)"""
    api_key_file: Path | None = None
    """file that has the server's API key"""
    profile: str | None = None
    """exact, balanced or fast: format of the dense layers; with --url, that of the running server
    (default: the target's)"""
    text: Path | None = None
    """text to cut prompts from (default: made here)"""
    skip_coherence: bool = False
    """do not ask the model a simple question first"""
    out: Path | None = None
    """folder for the result; an interrupted run in it continues (default:
    dist/TARGET/bench/TIME-TABLE)"""
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
    tolerance: NonNegativeFloat = 3.0
    """smallest change that counts, in percent (default: 3)"""
    disturbed: bool = False
    """compare results that are not clean, too"""
    output: OutputOptions = OutputOptions()


def run(options: RunOptions) -> int:
    """Measure the speed of a server."""
    if options.quick and options.profile_table not in (None, "quick"):
        msg = f"--quick and --profile-table {options.profile_table} contradict each other"
        raise UsageError(msg, "omit one of them")
    table = "quick" if options.quick else options.profile_table or "seeds"
    place = None
    if options.api_key_file is not None and options.url is None:
        raise UsageError("--api-key-file needs --url", "add --url http://HOST:PORT")
    if options.url is not None:
        for name, value in (("--vs", options.vs), ("--", options.arguments)):
            if value:
                msg = f"{name} is for a server that bench starts, and --url names a running one"
                raise UsageError(msg, "omit one of them")
        place = client.place_of({"SPARKFORGE_API_KEY_FILE": str(options.api_key_file)}, options.url)
        if options.api_key_file is not None and not place.key:
            msg = f"--api-key-file {options.api_key_file}: no API key in it"
            raise UsageError(msg, "name a file with the key on one line")
    tests = benchy.TABLES[table]
    text = benchy.text_for(tests)
    if options.text is not None:
        try:
            text = options.text.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--text {options.text}: {error}", "name a text file") from None
    project = Project.open(options.project)
    chosen = project.pins.target(options.target)
    if options.model is None and (chosen.smoke if place is None else chosen.model) is None:
        msg = f"target {options.target} has no model of its own for this"
        raise UsageError(msg, "name the model's folder with --model DIR")
    out = options.out or new_folder(project.root / "dist" / options.target / "bench", table)
    tool = benchy.install(project.store, project.root, host_platform(), project.access)
    with project.store.temporary("bench") as work:
        model = options.model
        if place is not None:
            found = [sides.running(place, options.target, options.profile or "")]
            model = model or sides.tokenizer(project.pins.models[str(chosen.model)])
        else:
            build = last_build(
                project, options.target, options.variant, options.server, options.arguments
            )
            profile = build.context.serving
            if options.profile is not None:
                profile = serve.chosen(build.context, options.profile)
            model = None if model is None else serve.checkpoint(model)
            build.run("image")
            versus = options.vs is not None
            found = sides.of_build(build, model, profile, work, versus=versus)
            model = model or sides.standing_in(build)  # the BF16 one's tokenizer, too
        common = Identity(
            "url",
            options.target,
            machine=session.machine(),
            table=table,
            runs=options.runs,
            tool=tool.version,
            lock=tool.lock,
            text=hashlib.sha256(text.encode()).hexdigest(),
        )
        call = benchy.Call(
            tool,
            model,
            work / "home",
            1 if options.vs else options.runs,
            prefix_caching=table == "community",
            coherent=not options.skip_coherence and bool(options.model or options.url),
        )
        benchy.prepare(call.home, text)
        rounds = options.runs if options.vs else 1
        runs = [Measurement.of(one, common, tests, call, rounds, out) for one in found]
        # two models do not fit into one GPU
        session.measure(runs, rounds, together=options.vs is not None and chosen.cuda_arch is None)
    return _report(runs, as_json=options.output.json)


def new_folder(parent: Path, table: str) -> Path:
    """Return a new folder's path, named after the time."""
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    first = parent / f"{started}-{table}"
    numbered = (parent / f"{first.name}-{number}" for number in range(2, 1000))
    return next(path for path in (first, *numbered) if not path.exists())


def _report(runs: Sequence[Measurement], *, as_json: bool) -> int:
    """Print the results; of two also the comparison."""
    document: dict[str, Any] = {"results": [plain.as_json(run.result) for run in runs]}
    document["folders"] = [str(run.folder) for run in runs]
    for run in runs:
        log.heading(f"{run.result.identity.origin} {run.result.identity.release}: {run.folder}")
        log.table(result.summary(run.result))
    if len(runs) == 2:
        comparison = result.compare(runs[0].result, runs[1].result)
        document["comparison"] = asdict(comparison)
        log.heading("B, patched, compared with A, unpatched")
        log.table(result.table(comparison))
    if not all(run.result.clean for run in runs):
        log.warning("not clean: do not quote these figures; `bench compare` refuses them")
    if as_json:
        log.json(document)
    return 0


def compare_results(options: CompareOptions) -> int:
    """Compare two results; CheckError if the second is slower."""
    before, after = result.load(options.a), result.load(options.b)
    for path, run in ((options.a, before), (options.b, after)):
        if not (run.clean or options.disturbed):
            why = run.disturbed[0] if run.disturbed else "the run is incomplete"
            hint = "measure again on an idle machine, or add --disturbed"
            raise ServerError(f"{path} is not clean: {why}", hint)
    comparison = result.compare(before, after, options.tolerance / 100)
    for what in comparison.differs:
        log.warning(what)
    if options.output.json:
        log.json(asdict(comparison))
    else:
        log.table(result.table(comparison))
    if not comparison.slower:
        return 0
    words = "\n".join(
        f"{one.name}: {one.metric} is {one.ratio:.3f} of A ({one.low:.3f} to {one.high:.3f})"
        for one in comparison.slower
    )
    hint = "find the cause with build.py ablate --bisect, or allow more with --tolerance"
    return log.failure(CheckError(f"B is slower than A:\n{words}", hint))
