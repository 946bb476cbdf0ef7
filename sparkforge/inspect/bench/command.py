"""`build.py bench`: its options and output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sparkforge.build import executor
from sparkforge.build.context import Context
from sparkforge.build.options import (
    OutputOptions,
    ServerOptions,
    VariantOptions,
    as_last,
    host_platform,
    platform_of,
)
from sparkforge.build.setup import last_context
from sparkforge.core.command import (
    Entry,
    argument,
    behind,
    count,
    needed,
    option,
    share,
    switch,
)
from sparkforge.core.errors import BenchError, RegressionError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime.client import Place, is_key, place_of
from sparkforge.sources.project import Project, ProjectOptions

_LEAST_TEXT = 10_000


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``bench``."""

    target: str = needed("target to measure", metavar="NAME")
    url: str | None = option(
        "measure this server, http://HOST:PORT (default: start the last build)",
        metavar="URL",
    )
    vs: Literal["unpatched"] | None = option(
        "measure the unpatched release too, in the same session, rounds in turns",
        choices=("unpatched",),
    )
    profile_table: str | None = option(
        "what to measure: quick, seeds or community (default: seeds)",
        choices=("quick", "seeds", "community"),
    )
    quick: bool = switch("short for --profile-table quick")
    runs: int | None = option(
        "runs of each test (default: the table's, 3); with --vs rounds", type=count, metavar="N"
    )
    model: Path | None = option(
        "folder of the checkpoint; with --url, of its tokenizer.json (default: a tiny model with"
        " canned replies; with --url, where the server or the hub's cache has it)",
        type=Path,
        metavar="DIR",
    )
    served_model: str | None = option(
        "the model's id (default: the server's first)", needs="--url", metavar="NAME"
    )
    api_key_file: Path | None = option(
        "file that has the server's API key", needs="--url", type=Path, metavar="FILE"
    )
    profile: str | None = option(
        "exact, balanced or fast: format of the dense layers; with --url, that of the running"
        " server, for the ceiling (default: the target's)",
        metavar="NAME",
    )
    text: Path | None = option(
        "text to cut prompts from (default: made here)", type=Path, metavar="FILE"
    )
    skip_coherence: bool = switch("do not ask the model a simple question first")
    out: Path | None = option(
        "new folder for the result (default: dist/TARGET/bench/TIME-TABLE)",
        type=Path,
        metavar="DIR",
    )
    arguments: tuple[str, ...] = behind()
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions = as_last()
    server: ServerOptions


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``bench compare``."""

    a: Path = argument("the earlier result: a folder of `bench`, or its result.json", type=Path)
    b: Path = argument("the later one", type=Path)
    tolerance: float = option(
        "smallest change that counts, in percent (default: 3)",
        default=3.0,
        type=share,
        metavar="PERCENT",
    )
    disturbed: bool = switch("compare results that are not clean, too")
    output: OutputOptions


def _run(options: RunOptions) -> int:
    """Measure the speed of a server."""
    from sparkforge.inspect.bench import benchy, guard, result, session, sides, tables

    if options.quick and options.profile_table not in (None, "quick"):
        msg = f"--quick and --profile-table {options.profile_table} contradict each other"
        raise UsageError(msg, "omit one of them")
    name = "quick" if options.quick else options.profile_table or "seeds"
    table = tables.TABLES[name]
    words = None if options.text is None else _text(options.text)
    place = _check_run(options)
    project = Project.open(options.project)
    chosen = project.pins.target(options.target)
    out = options.out or new_folder(project.root / "dist" / options.target / "bench", name)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UsageError(f"--out {out}: exists already", "name a new folder")
    tool = benchy.install(project.store, project.root, host_platform(), project.access)
    with project.store.temporary("bench") as work:
        if place is not None:
            context = Context.of(project, options.target, platform_of(chosen))
            served = sides.Served(None, _profile(context, options.profile))
            key = _key(options.api_key_file)
            asked = benchy.Asked(place.root, options.served_model or "", key)
            found = [sides.running(asked, options.target, options.profile or "")]
            named = options.model
        else:
            context = last_context(
                project, options.target, options.variant, options.server, options.arguments
            )
            if options.model is None and context.target.smoke is None:
                msg = f"target {context.target_name} has no tiny model"
                remedy = "name the checkpoint with --model DIR, or a running server with --url URL"
                raise UsageError(msg, remedy)
            named = None if options.model is None else serve_checkpoint(options.model)
            served = sides.Served(named, _profile(context, options.profile))
            build = executor.build(context, "image")
            found = sides.of_build(context, build, served, work, versus=options.vs is not None)
            named = named or sides.standing_in(context, build)  # the BF16 one has the same
        model = project.pins.models[chosen.model] if chosen.model else None
        runs = options.runs or table.runs
        plan = session.Plan(
            table_name=name,
            table=table,
            tool=tool,
            runs=1 if options.vs else runs,
            rounds=runs if options.vs else 1,
            together=options.vs is not None and chosen.cuda_arch is None,
            words=words,
            tokenizer=lambda said: sides.tokenizer(
                named,
                model.repository if model else "",
                model.revision if model else "",
                said,
            ),
            coherent=not options.skip_coherence
            and (options.model is not None or options.url is not None),
            machine=result.machine(guard.smi()),
            ceilings=lambda tests: sides.ceilings(context, served.profile, tests),
        )
        results = session.run(found, plan, out, work)
    return _report(results, [out / side.name for side in found], as_json=options.output.json)


def _check_run(options: RunOptions) -> Place | None:
    """Check for conflicting options; return the running server, if they name one.

    Raises:
        UsageError: options conflict, or the server's URL is invalid.
    """
    if options.url is None:
        return None
    for name, value in (("--vs", options.vs), ("--", options.arguments)):
        if value:
            msg = f"{name} is for a server that bench starts, and --url names a running one"
            raise UsageError(msg, "omit one of them")
    return place_of({}, options.url)


def serve_checkpoint(model: Path) -> Path:
    """Return the full path of a checkpoint's folder; raises as ``serve.checkpoint``."""
    from sparkforge.build import serve

    return serve.checkpoint(model)


def _profile(context: Context, name: str | None) -> Any:
    from sparkforge.build import serve

    return context.serving if name is None else serve.chosen(context, name)


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--text {path}: {why}", "name a text file") from None
    if len(text) < _LEAST_TEXT:
        msg = f"--text {path}: {len(text)} characters"
        raise UsageError(msg, f"use a text of at least {_LEAST_TEXT:,}, such as a book")
    return text


def _key(path: Path | None) -> str:
    if path is None:
        return ""
    hint = "give the file that holds the key"
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--api-key-file {path}: {why}", hint) from None
    if not is_key(key):
        msg = f"--api-key-file {path}: not an API key (one line of ASCII without spaces)"
        raise UsageError(msg, hint)
    return key


def new_folder(parent: Path, table: str) -> Path:
    """Return a new folder's path, named after the time."""
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    first = parent / f"{started}-{table}"
    numbered = (parent / f"{first.name}-{number}" for number in range(2, 1000))
    return next(path for path in (first, *numbered) if not path.exists())


def _report(results: Any, folders: list[Path], *, as_json: bool) -> int:
    """Print the results; of two also the comparison."""
    from sparkforge.core import typed
    from sparkforge.inspect.bench import compare, result

    document: dict[str, Any] = {"results": [typed.as_json(run) for run in results]}
    document["folders"] = [str(folder) for folder in folders]
    for run, folder in zip(results, folders, strict=True):
        log.heading(f"{run.identity.origin} {run.identity.release}: {folder}")
        log.table(result.summary(run))
        for what in run.disturbed:
            log.warning(f"disturbed, not clean: {what}")
    if len(results) == 2:
        comparison = compare.compare(*results)
        document["comparison"] = _finite(asdict(comparison))
        clean = all(run.clean for run in results)
        note = "" if clean else " (not clean: no verdict counts)"
        log.heading(f"B, patched, compared with A, unpatched{note}")
        log.table(compare.table(comparison))
    if as_json:
        log.json(document)
    return 0


def _finite(value: Any) -> Any:
    """Return a JSON value with None instead of infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _compare(options: CompareOptions) -> int:
    """Compare two results; 28 if the second is slower."""
    from sparkforge.inspect.bench import compare, result

    before, after = result.load(options.a), result.load(options.b)
    for path, run in ((options.a, before), (options.b, after)):
        if run.clean or options.disturbed:
            continue
        why = run.disturbed[0] if run.disturbed else "the run is incomplete"
        msg = f"{path} is not clean: {why}"
        raise BenchError(msg, "measure again on an idle machine, or add --disturbed")
    comparison = compare.compare(before, after, options.tolerance / 100)
    for what in comparison.differs:
        log.warning(what)
    for what in comparison.only_in_one:
        log.warning(f"in one result only: {what}")
    if options.output.json:
        log.json(_finite(asdict(comparison)))
    else:
        log.table(compare.table(comparison))
    if not comparison.slower:
        return 0
    words = "\n".join(
        f"{change.name}: {change.metric} is {change.ratio:.3f} of A"
        f" ({change.low:.3f} to {change.high:.3f})"
        for change in comparison.slower
    )
    remedy = "find the cause with build.py ablate --bisect, or allow more with --tolerance"
    return log.failure(RegressionError(f"B is slower than A:\n{words}", remedy))


COMMANDS = (
    Entry("bench run", RunOptions, _run, "measure speed; `bench --target NAME` is short for it"),
    Entry("bench compare", CompareOptions, _compare, "compare two results, test by test"),
)
