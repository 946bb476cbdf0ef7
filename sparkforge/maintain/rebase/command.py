"""The command ``rebase``: its options and output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.core.disk import write_file
from sparkforge.core.errors import RebaseStopped, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.companions import trial
from sparkforge.maintain.companions.trial import Move
from sparkforge.maintain.rebase import carry, drift, job, release_spec
from sparkforge.maintain.rebase.drift import Drift
from sparkforge.maintain.rebase.job import Job, Plan
from sparkforge.maintain.rebase.land import drifting, land, planned
from sparkforge.maintain.rebase.mover import Mover, dry_run
from sparkforge.maintain.rebase.verdicts import HEAD, PatchResult
from sparkforge.sources.project import Project, ProjectOptions

_MANY = re.compile(r"latest:([1-9][0-9]?)")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``rebase``."""

    upstream: str | None = field(default=None, kw_only=False)
    """upstream whose series to move"""
    all: bool = False
    """try every upstream; change nothing"""
    onto: str | None = None
    """new base: TAG, full commit SHA, release:VERSION, release:FILE or latest; with --all also
    latest:N for the N newest"""
    dry_run: bool = False
    """show the result without changing files"""
    table: bool = False
    """write the table to dist/rebase/carry.md"""
    commit: str | None = None
    """commit that the release was built from"""
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


def run(options: Options = Options()) -> int:
    """Move a series, or report on a move; 19 where a patch needs work."""
    _check_options(options)
    project = Project.open(options.project)
    if options.onto is not None and options.all:
        return _all(options, project, options.onto)
    if options.onto is not None and options.dry_run:
        return _dry_run(_job(project, str(options.upstream)), options.onto)
    assert options.upstream is not None
    with job.locked(project.root):
        return _move(options, _job(project, options.upstream))


def _check_options(options: Options) -> None:
    answers = options.go_on or options.abort or options.skip is not None
    ends = options.onto or options.go_on or options.skip is not None
    shows = options.all or options.dry_run
    many = options.onto is not None and _MANY.fullmatch(options.onto)
    starts = options.all or options.dry_run or options.companions
    wrong = {
        "--all, --dry-run and --with-companions need --onto": starts and options.onto is None,
        "--table needs --all": options.table and not options.all,
        "--continue, --skip and --abort conflict": (
            options.go_on + options.abort + (options.skip is not None) > 1
        ),
        "an upstream and --all conflict": options.upstream and options.all,
        "no upstream given": not options.upstream and not options.all,
        "--onto is empty": options.onto is not None and not options.onto.strip(),
        "--onto starts a rebase; the others continue or end one": options.onto and answers,
        "--skip needs a reason": options.skip is not None and not options.skip.strip(),
        "--commit is only for the end of a rebase": options.commit and (shows or not ends),
        "--commit needs 40 digits": not re.fullmatch(r"[0-9a-f]{40}", options.commit or "0" * 40),
        "--with-companions and a dry run conflict": options.companions and shows,
        f"--onto {options.onto} needs --all": many and not options.all,
    }
    for what, found in wrong.items():
        if found:
            raise UsageError(what, "see build.py rebase --help")


def _job(project: Project, upstream: str) -> Job:
    project.pins.upstream(upstream)
    mirror = project.access.mirrors.get(upstream)
    return Job(project, upstream, Path(mirror) if mirror and Path(mirror).is_dir() else None)


# -- a rebase ------------------------------------------------------------------------------


def _move(options: Options, own: Job) -> int:
    upstream = own.upstream
    if options.abort:
        there = own.remove()
        log.info(f"{upstream}: {'cancelled' if there else 'no rebase in progress'}")
        log.document({"aborted": there})
        return 0
    plan = own.load()
    if options.onto is not None:
        if plan is not None and plan.spec != options.onto:
            msg = f"{upstream}: a rebase onto {plan.spec} is in progress"
            raise UsageError(msg, "build.py rebase UPSTREAM --continue, or --abort")
        plan = plan or own.begin(options.onto, options.commit, companions=options.companions)
    elif not options.go_on and options.skip is None:
        return _status(own, plan)
    elif plan is None:
        msg = f"{upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto release:VERSION")
    own.check_same(plan)
    if options.commit is not None:
        first = plan.parts[0]
        release_spec.check_commit(first.target, options.commit, first.declared_commit)
        first.target = first.target.model_copy(update={"commit": options.commit})
    if options.onto is None:
        skip = options.skip
        own.answer(plan, None if skip is None else " ".join(skip.split()))  # one line
    try:
        own.run(plan)
    finally:
        _print(plan)
    move = _tried(own, plan) if plan.companions else None
    landed = land(own, plan, move)
    for path in landed.changed:
        log.info(f"changed: {path.relative_to(own.project.root)}")
    _say(landed.drift)
    log.info(f"report: {landed.report}")
    if move is None:
        log.info("next: run the patches' tests (--with-companions runs them before it lands)")
    log.document(
        _document(plan, landed.drift)
        | {
            "landed": True,
            "report": str(landed.report),
            "changed": [str(path) for path in landed.changed],
            "tests": None if move is None else [test.as_json() for test in move.tests],
        }
    )
    return 0


def _tried(own: Job, plan: Plan) -> Move:
    """Make and try a move; where it fails, the moved patches may be amended."""
    with own.project.locked() as held:  # not longer: a trial takes minutes
        landing = planned(own, held, plan)
    names = [part.upstream for part in plan.parts]
    made = trial.make(
        held,
        landing.files,
        plan.moved,
        names,
        own.folder,
        lambda here: drifting(here, plan, landing.series),
    )
    for result in made.tests:
        if result.verdict == "not noticed":
            log.warning(
                f"{result.upstream}: {result.patch.removesuffix('.patch')}: upstream has it: its"
                " test passes without our patches\n    hint: drop it: build.py patches export"
                f" --drop {result.patch}"
            )
    return made


def _status(own: Job, plan: Plan | None) -> int:
    if plan is None:
        log.info(f"{own.upstream}: no rebase is in progress; start one: --onto release:VERSION")
        log.document({"upstream": own.upstream, "under_way": False})
        return 0
    _print(plan)
    log.document(_document(plan, ()) | {"under_way": True})
    if plan.stopped is not None:
        return log.failure(own.stop_of(plan.stopped))
    log.info(f"{own.upstream}: onto {plan.spec}: interrupted, or its trial failed; use --continue")
    return 0


# -- dry runs --------------------------------------------------------------------------------


def _dry_run(own: Job, spec: str) -> int:
    project, upstream = own.project, own.upstream
    pinned = project.pins.upstream(upstream)
    release = release_spec.resolve(project, upstream, spec, complete=True)
    old = release_spec.old_source(project, upstream, release)
    series = own.series_of(upstream)
    moving = Mover.of(project.store, series, old, release.source, pinned.paths, own.history)
    results = dry_run(project.store, moving)
    drifts = drift.find(project, release.upstream, release.source, old)
    drifts += drift.unknown(upstream, release.upstream, release.declared_commit, release.lacking)
    versions = {name: pin.version for name, pin in project.pins.upstreams.items()}
    drifts += drift.droppable([series], versions | {upstream: release.upstream.version})
    _table(results)
    _say(drifts)
    document = {
        "upstream": upstream,
        "from": pinned.tag,
        "onto": release.upstream.tag,
        "patches": [result.as_json() for result in results],
        "companions": [item.as_json() for item in drifts],
    }
    log.document(document)
    return _verdict_code(results)


def _all(options: Options, project: Project, spec: str) -> int:
    many = _MANY.fullmatch(spec)
    if many is None and spec != "latest":
        raise UsageError(f"--all --onto {spec}", "give --onto latest, or latest:N")
    chosen = chosen_series(None, project.root, project.pins)
    tables = carry.carried(project, chosen, int(many[1]) if many else 1)
    for table in tables:
        log.heading(table.series.upstream)
        log.table(table.rows())
    log.document({table.series.upstream: table.as_json() for table in tables})
    if options.table:
        path = project.root / "dist" / "rebase" / "carry.md"
        write_file(path, carry.page(tables).encode())
        log.info(f"written: {path}")
        return 0
    newest = [next(reversed(table.columns.values())) for table in tables]
    return max((_verdict_code(results or []) for results in newest), default=0)


def _verdict_code(results: list[PatchResult]) -> int:
    if not any(result.stops for result in results):
        return 0
    count = sum(result.stops for result in results)
    log.error(f"{count} of {len(results)} patches need work")
    return RebaseStopped.exit_code


# -- printing --------------------------------------------------------------------------------


def _print(plan: Plan) -> None:
    for part in plan.parts:
        if part.results:
            log.heading(f"{part.upstream}: {part.pinned['tag']} → {part.target.tag}")
            _table(part.results)


def _table(results: list[PatchResult]) -> None:
    log.table([HEAD, *(result.row() for result in results)] if results else [])
    for result in results:
        for text in (*result.detail, *result.causes):
            log.info(f"{result.patch.removesuffix('.patch')}: {text}")


def _say(drifts: Iterable[Drift]) -> None:
    for difference in drifts:
        log.warning(difference.what)
        log.info(f"  hint: {difference.hint}")


def _document(plan: Plan, drifts: Iterable[Drift]) -> dict[str, Any]:
    return {
        "upstream": plan.upstream,
        "onto": plan.spec,
        "series": {
            part.upstream: {
                "patches": [result.as_json() for result in part.results if not result.stops],
                "stopped": part.stopped,
            }
            for part in plan.parts
        },
        "companions": [item.as_json() for item in drifts],
    }
