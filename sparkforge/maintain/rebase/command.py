"""The command ``rebase``: its options and output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.core import pages
from sparkforge.core.command import Entry, argument, option, switch
from sparkforge.core.errors import RebaseStopped, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.companions import move as moving
from sparkforge.maintain.companions.move import Move
from sparkforge.maintain.rebase import carry, drift, release_spec, report, state
from sparkforge.maintain.rebase.drift import DependencyDrift
from sparkforge.maintain.rebase.drive import Rebase, stopped
from sparkforge.maintain.rebase.land import drifting, land, planned
from sparkforge.maintain.rebase.patch_rebase import verdicts
from sparkforge.maintain.rebase.state import Job, State
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.sources.project import Project, ProjectOptions, recover_checkout

_MANY = re.compile(r"latest:([1-9][0-9]?)")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``rebase``."""

    upstream: str | None = argument("upstream whose series to move", default=None, nargs="?")
    all: bool = switch("try every upstream; change nothing", needs="--onto")
    onto: str | None = option(
        "new base: TAG, full commit SHA, release:VERSION, release:FILE or latest;"
        " with --all also latest:N for the N newest",
        metavar="WHERE",
    )
    dry_run: bool = switch("show the result without changing files", needs="--onto")
    table: bool = switch("write docs/carry.md", needs="--all")
    commit: str | None = option("commit that the release was built from", metavar="SHA")
    companions: bool = switch(
        "move requirements, locks and other upstreams, too, and try all of it before it lands",
        "--with-companions",
        needs="--onto",
    )
    go_on: bool = switch("continue a stopped or killed rebase", "--continue", one_of="answer")
    """--continue."""
    skip: str | None = option(
        "drop the patch that stopped the rebase", metavar="REASON", one_of="answer"
    )
    abort: bool = switch(
        "cancel the rebase; patches/ and pins.yaml stay as they are", one_of="answer"
    )
    project: ProjectOptions
    output: OutputOptions


def run(options: Options) -> int:
    """Move a series, or report on a move; 19 where a patch needs work."""
    _check_options(options)
    if options.onto is not None and (options.all or options.dry_run):
        project = Project.open(options.project)
        if options.upstream is None:
            return _all(options, project, options.onto)
        return _dry_run(project, options.upstream, options.onto)
    with state.locked(recover_checkout(options.project.pins).parent):
        project = Project.open(options.project)
        if options.upstream is None:
            return _every_status(project)
        return _move(options, project, options.upstream)


def _check_options(options: Options) -> None:
    answers = options.go_on or options.abort or options.skip is not None
    if options.upstream and options.all:
        raise UsageError("an upstream and --all conflict", "give only one")
    if options.onto is not None and answers:
        raise UsageError("--onto starts a rebase; the others continue or end one", "give only one")
    if options.upstream is None and not options.all and (options.onto or options.commit or answers):
        raise UsageError("no upstream given", "give an upstream: build.py rebase vllm …")
    if options.onto is not None and not options.onto.strip():
        raise UsageError("--onto is empty", "give a release, for example release:0.32.0")
    if options.skip is not None and not options.skip.strip():
        raise UsageError("--skip needs a reason", "say why; the reason goes into the changelog")
    moves = options.onto or options.go_on or options.skip is not None
    ends = moves and not (options.all or options.dry_run or options.abort)
    if options.commit is not None and not ends:
        raise UsageError("--commit is only for the end of a rebase", "use it with --continue")
    if options.commit is not None and not re.fullmatch(r"[0-9a-f]{40}", options.commit):
        raise UsageError(f"--commit {options.commit}: not 40 digits", "give the full commit SHA")
    if options.companions and (options.all or options.dry_run):
        raise UsageError(
            "--with-companions and a dry run conflict", "a move is tried before anything changes"
        )
    if options.onto is not None and _MANY.fullmatch(options.onto) and not options.all:
        raise UsageError(f"--onto {options.onto} needs --all", "give one release")


def _rebase(project: Project, upstream: str) -> Rebase:
    project.pins.upstream(upstream)
    mirror = project.access.mirrors.get(upstream)
    history = Path(mirror) if mirror and Path(mirror).is_dir() else None
    return Rebase(project, upstream, history)


# -- a rebase ------------------------------------------------------------------------------


def _move(options: Options, project: Project, upstream: str) -> int:
    job = Job(project.root, upstream)
    if options.abort:
        project.pins.upstream(upstream)
        there = job.folder.exists()
        job.remove()
        log.info(
            f"{upstream}: {'cancelled' if there else 'no rebase in progress'}; pins.yaml"
            " and the series are as they were"
        )
        log.document({"aborted": there})
        return 0
    rebase = _rebase(project, upstream)
    now = job.load()
    known = {part.upstream: len(part.results) for part in now.parts} if now is not None else {}
    if options.onto is not None:
        if now is not None and now.spec != options.onto:
            msg = f"{upstream}: a rebase onto {now.spec} is in progress"
            raise UsageError(msg, "build.py rebase UPSTREAM --continue, or --abort")
        if now is not None and options.commit is not None:
            _commit(rebase, now, options.commit)
        now = now or rebase.begin(options.onto, options.commit, companions=options.companions)
    elif options.go_on or options.skip is not None:
        now = _answer(options, rebase, now)
    else:
        return _status(upstream, job, now)
    rebase.check_same(now)
    try:
        rebase.run(now)
    finally:
        _print(now, known)
    move = _tried(rebase, now) if now.companions else None
    landed = land(rebase, now, move)
    for path in landed.changed:
        log.info(f"changed: {path.relative_to(rebase.project.root)}")
    _say(landed.drift)
    for patch, test in landed.tests.items():
        name = patch.removesuffix(".patch")
        log.warning(
            f"{name} was dropped, and its test is left: {test}\n"
            "    hint: remove the test, or keep it if the new release passes it"
        )
    log.info(f"report: {landed.report}")
    if move is None:
        log.info("next: run the patches' tests (--with-companions runs them before it lands)")
    log.info(f"docs/carry.md describes the old release; update it: build.py {carry.COMMAND}")
    log.document(
        _document(now, landed.drift)
        | {
            "landed": True,
            "report": str(landed.report),
            "changed": [str(path) for path in landed.changed],
            "tests_left": dict(landed.tests),
            "tests": None if move is None else [test.as_json() for test in move.tried.tests],
        }
    )
    return 0


def _tried(rebase: Rebase, now: State) -> Move:
    """Make and try a move; where it fails, the moved patches may be amended."""
    project = rebase.project
    with project.locked() as held:  # not longer: a trial takes minutes
        landing = planned(rebase, held, now)
    try:
        made = moving.make(
            held,
            landing.files,
            now.moved,
            [part.upstream for part in now.parts],
            rebase.job.folder,
            lambda here: drifting(here, now, landing.series),
        )
    except RebaseStopped:
        now.tried = True
        rebase.job.save(now)
        raise
    for result in made.tried.taken:
        log.warning(
            f"{result.upstream}: {result.patch.removesuffix('.patch')}: upstream has it: its test"
            f" passes without our patches\n    hint: drop it: build.py patches export --drop"
            f" {result.patch}"
        )
    return made


def _answer(options: Options, rebase: Rebase, now: State | None) -> State:
    if now is None:
        msg = f"{rebase.upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto release:VERSION")
    rebase.check_same(now)
    if options.commit is not None:
        _commit(rebase, now, options.commit)
    part = now.stopped
    if options.skip is not None:
        if part is None:
            raise UsageError(f"{rebase.upstream}: no patch is stopped", "use --continue")
        rebase.skip(now, part, " ".join(options.skip.split()))  # one line of the changelog
    elif part is not None:
        rebase.resolve(now, part)
    else:
        rebase.adopt(now)
    return now


def _commit(rebase: Rebase, now: State, commit: str) -> None:
    own = now.parts[0]
    release_spec.check_commit(own.target, commit, own.declared_commit)
    own.target = own.target.model_copy(update={"commit": commit})
    rebase.job.save(now)


def _status(upstream: str, job: Job, now: State | None) -> int:
    if now is None:
        log.info(f"{upstream}: no rebase is in progress; start one: --onto release:VERSION")
        log.document({"upstream": upstream, "under_way": False})
        return 0
    _print(now)
    log.document(_document(now, ()) | {"under_way": True})
    if now.stopped is not None:
        return log.failure(stopped(job, now.stopped))
    ended = "failed when it was tried" if now.tried else "was interrupted"
    log.info(f"{upstream}: onto {now.spec} {ended}; use --continue")
    return 0


def _every_status(project: Project) -> int:
    jobs = {name: Job(project.root, name).load() for name in project.pins.upstreams}
    states = {name: now for name, now in jobs.items() if now is not None}
    for name, now in states.items():
        part = now.stopped
        where = f"stopped at {part.stopped.patch}" if part and part.stopped else "interrupted"
        log.info(f"{name}: onto {now.spec}: {where}")
    if not states:
        log.info("no rebase is in progress")
    log.document({name: _document(now, ()) for name, now in states.items()})
    return 0


# -- dry runs --------------------------------------------------------------------------------


def _dry_run(project: Project, upstream: str, spec: str) -> int:
    rebase = _rebase(project, upstream)
    pinned = project.pins.upstream(upstream)
    release = release_spec.resolve(project, upstream, spec, complete=True)
    old = release_spec.old_source(project, upstream, release)
    series = rebase.series_of(upstream)
    results = verdicts(
        project.store, series, old, release.source, history=rebase.history, rules=pinned.paths
    )
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
    count = int(many[1]) if many else 1
    tables = carry.carried(project, chosen, count)
    for table in tables:
        log.heading(table.series.upstream)
        log.table(carry.rows(table))
    log.document({table.series.upstream: table.as_json() for table in tables})
    if options.table:
        files = {project.root / "docs" / "carry.md": carry.page(tables)}
        for page in pages.settle(files, carry.COMMAND, check=False):
            log.info(f"{page}: written")
        return 0
    newest = [table.columns[-1].results or () for table in tables]
    return max((_verdict_code(list(results)) for results in newest), default=0)


def _verdict_code(results: list[PatchResult]) -> int:
    if not any(result.stops for result in results):
        return 0
    count = sum(result.stops for result in results)
    log.error(f"{count} of {len(results)} patches need work")
    return RebaseStopped.exit_code


# -- printing --------------------------------------------------------------------------------


def _print(now: State, known: Mapping[str, int] = MappingProxyType({})) -> None:
    """Print the results of the patches.

    Args:
        known: number of earlier results of each series; they are not printed.
    """
    for part in now.parts:
        done = part.results[known.get(part.upstream, 0) :]
        results = [*done, *([part.stopped] if part.stopped else [])]
        if results:
            log.heading(f"{part.upstream}: {part.pinned['tag']} → {part.target.tag}")
            _table(results)


def _table(results: list[PatchResult]) -> None:
    log.table([report.HEAD, *(report.row(result) for result in results)] if results else [])
    for result in results:
        for text in (*result.detail, *result.causes):
            log.info(f"{result.patch.removesuffix('.patch')}: {text}")


def _say(drifts: list[DependencyDrift] | tuple[DependencyDrift, ...]) -> None:
    for difference in drifts:
        log.warning(difference.what)
        log.info(f"  hint: {difference.hint}")


def _document(now: State, drifts: tuple[DependencyDrift, ...]) -> dict[str, Any]:
    return {
        "upstream": now.upstream,
        "onto": now.spec,
        "series": {
            part.upstream: {
                "patches": [result.as_json() for result in part.results],
                "stopped": part.stopped.as_json() if part.stopped else None,
            }
            for part in now.parts
        },
        "companions": [item.as_json() for item in drifts],
    }


COMMANDS = (Entry("rebase", Options, run),)
