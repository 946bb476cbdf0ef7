"""``rebase``: move a series to another release, from start to landing."""

from collections.abc import Iterable
from dataclasses import asdict, field
from typing import Annotated, Any

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions, command_options
from sparkforge.core.errors import RebaseStopped, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import drift, landing, releases
from sparkforge.maintain.drift import Note
from sparkforge.maintain.findings import HEAD, PatchResult
from sparkforge.maintain.job import Job, Plan, locked
from sparkforge.maintain.mover import dry_run
from sparkforge.sources.project import Project, ProjectOptions


@command_options
class Options:
    """Options of ``rebase``."""

    upstream: str = field(kw_only=False)
    """upstream whose series to move"""
    onto: str | None = None
    """new base: a version or its tag, from the index or from --mirror's repository"""
    dry_run: bool = False
    """show the result without changing files"""
    companions: Annotated[bool, Parameter(name="--with-companions")] = False
    """move requirements, locks and other upstreams, too, and try all of it before it lands"""
    go_on: Annotated[bool, Parameter(name="--continue")] = False
    """continue a stopped or killed rebase"""
    skip: str | None = None
    """drop the patch that stopped the rebase"""
    abort: bool = False
    """cancel the rebase; patches/ and pins.yaml stay as they are"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Move a series, or report on a move; 6 where a patch needs work."""
    answers = [options.onto is not None, options.go_on, options.skip is not None, options.abort]
    wrong = {
        "--onto, --continue, --skip and --abort exclude each other": sum(answers) > 1,
        "--dry-run and --with-companions need --onto": options.onto is None
        and (options.dry_run or options.companions),
        "--skip needs a reason": options.skip is not None and not options.skip.strip(),
        "--dry-run and --with-companions conflict": options.dry_run and options.companions,
    }
    for what, found in wrong.items():
        if found:
            raise UsageError(what, "see build.py rebase --help")
    project = Project.open(options.project)
    project.pins.upstream(options.upstream)
    job = Job(project, options.upstream)
    if options.onto is not None and options.dry_run:
        return _dry_run(job, options.onto)
    with locked(project.root):
        return _move(options, job)


def _move(options: Options, job: Job) -> int:
    upstream = job.upstream
    if options.abort:
        there = job.remove()
        log.info(f"{upstream}: {'cancelled' if there else 'no rebase in progress'}")
        log.document({"aborted": there})
        return 0
    plan = job.load()
    if options.onto is not None:
        if plan is not None and plan.spec != options.onto:
            msg = f"{upstream}: a rebase onto {plan.spec} is in progress"
            raise UsageError(msg, f"build.py rebase {upstream} --continue, or --abort")
        if plan is not None and any(part.stopped for part in plan.parts):
            return _status(job, plan)
        plan = plan or job.begin(options.onto, companions=options.companions)
    elif not options.go_on and options.skip is None:
        return _status(job, plan)
    elif plan is None:
        msg = f"{upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto VERSION")
    job.check_same(plan)
    try:
        job.move(plan, None if options.skip is None else " ".join(options.skip.split()))
    finally:
        _print(plan)
    changed, notes, tests = landing.land(job, plan)
    for path in changed:
        log.info(f"changed: {path.relative_to(job.project.root)}")
    _say(notes)
    if not plan.companions:
        log.info("next: run the patches' tests (--with-companions runs them before it lands)")
    document = {"landed": True, "changed": list(map(str, changed))}
    log.document(_document(plan, notes) | document | {"tests": [one.as_json() for one in tests]})
    return 0


def _status(job: Job, plan: Plan | None) -> int:
    if plan is None:
        log.info(f"{job.upstream}: no rebase is in progress; start one: --onto VERSION")
        log.document({"upstream": job.upstream, "under_way": False})
        return 0
    log.document(_document(plan, ()) | {"under_way": True})
    stopped = next((part for part in plan.parts if part.stopped is not None), None)
    if stopped is not None:
        return log.failure(job.stop_of(stopped))
    log.info(f"{job.upstream}: onto {plan.spec}: interrupted, or its trial failed; use --continue")
    return 0


def _dry_run(job: Job, spec: str) -> int:
    project, upstream = job.project, job.upstream
    pinned, own = project.pins.upstream(upstream), job.series_of(upstream)
    release = releases.resolve(project, upstream, spec, complete=True)
    results = dry_run(project.store, own, release, pinned.paths, job.memory(upstream))
    notes = [*release.notes, *drift.find(project, upstream, release.upstream)]
    notes += drift.droppable([own], {**project.pins.upstreams, upstream: release.upstream})
    table(results)
    _say(notes)
    plan = Plan(upstream, str(release.upstream.tag), [])
    document = _document(plan, notes) | {"from": pinned.tag}
    log.document(document | {"patches": list(map(asdict, results))})
    if count := sum(result.stops for result in results):
        log.error(f"{count} of {len(results)} patches need work")
    return RebaseStopped.exit_code if count else 0


def _print(plan: Plan) -> None:
    for part in plan.parts:
        if part.results:
            log.heading(f"{part.upstream}: {part.pinned} → {part.target.tag}")
            table(part.results)


def table(results: list[PatchResult]) -> None:
    """Print results as a table, with their findings below it."""
    log.table([HEAD, *(result.row() for result in results)] if results else [])
    for result in results:
        for text in result.detail:
            log.info(f"{result.patch.removesuffix('.patch')}: {text}")


def _say(notes: Iterable[Note]) -> None:
    for what, hint in notes:
        log.warning(f"{what}\n    hint: {hint}")


def _document(plan: Plan, notes: Iterable[Note]) -> dict[str, Any]:
    parts = {
        part.upstream: {"patches": list(map(asdict, part.results)), "stopped": part.stopped}
        for part in plan.parts
    }
    document = {"upstream": plan.upstream, "onto": plan.spec, "series": parts}
    return document | {"companions": [{"what": what, "mend": hint} for what, hint in notes]}
