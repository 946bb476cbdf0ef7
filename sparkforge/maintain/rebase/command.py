"""The command ``rebase``: what its options do, and what it prints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build.options import (
    OutputOptions,
    Project,
    ProjectOptions,
    chosen_series,
    recover_checkout,
)
from sparkforge.core import generated
from sparkforge.core.errors import RebaseStopped, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.rebase import carry, companions, onto, report, state, testing
from sparkforge.maintain.rebase.companions import Companion
from sparkforge.maintain.rebase.drive import Rebase, stopped
from sparkforge.maintain.rebase.land import land
from sparkforge.maintain.rebase.move import verdicts
from sparkforge.maintain.rebase.state import Job, State
from sparkforge.maintain.rebase.verdicts import Move

_MANY = re.compile(r"latest:([1-9][0-9]?)")


@dataclass(frozen=True)
class Options:
    """Options of ``rebase``.

    Attributes:
        go_on: --continue.
    """

    upstream: str | None
    all: bool
    onto: str | None
    dry_run: bool
    table: bool
    commit: str | None
    test: bool
    go_on: bool
    skip: str | None
    abort: bool
    project: ProjectOptions
    output: OutputOptions


def run(options: Options) -> int:
    """Move a series, or report on a move; 19 where a patch needs work."""
    _check_words(options)
    as_json = options.output.json
    if options.onto is not None and (options.all or options.dry_run):
        project = Project.open(options.project)
        if options.upstream is None:
            return _all(options, project, options.onto)
        return _dry_run(project, options.upstream, options.onto, as_json=as_json)
    with state.locked(recover_checkout(options.project.pins).parent):
        project = Project.open(options.project)
        if options.upstream is None:
            return _every_status(project, as_json=as_json)
        return _one(options, project, options.upstream)


def _check_words(options: Options) -> None:
    answers = options.go_on or options.abort or options.skip is not None
    mend = "see build.py rebase --help"
    if options.upstream and options.all:
        raise UsageError("an upstream and --all conflict", "give only one")
    if options.all and (options.onto is None or answers):
        raise UsageError("--all needs --onto", "give --onto latest")
    if options.table and not options.all:
        raise UsageError("--table needs --all", mend)
    if options.onto is not None and answers:
        raise UsageError("--onto starts a rebase; the others continue or end one", "give only one")
    if (
        options.upstream is None
        and not options.all
        and (options.onto or options.dry_run or options.commit or answers)
    ):
        raise UsageError("no upstream given", "give an upstream: build.py rebase vllm …")
    if options.onto is not None and not options.onto.strip():
        raise UsageError("--onto is empty", "give a release, for example release:0.32.0")
    if options.dry_run and options.onto is None:
        raise UsageError("--dry-run needs --onto", "give --onto")
    if options.skip is not None and not options.skip.strip():
        raise UsageError("--skip needs a reason", "say why; the reason goes into the changelog")
    if options.commit is not None and (
        options.all
        or options.dry_run
        or options.abort
        or not (options.onto or options.go_on or options.skip is not None)
    ):
        raise UsageError("--commit is only for the end of a rebase", "use it with --continue")
    if options.commit is not None and not re.fullmatch(r"[0-9a-f]{40}", options.commit):
        raise UsageError(f"--commit {options.commit}: not 40 digits", "give the full commit SHA")
    if options.test and (
        options.all
        or options.dry_run
        or options.abort
        or not (options.onto or options.go_on or options.skip is not None)
    ):
        raise UsageError(
            "--test is only for the end of a rebase", "use it with --onto or --continue"
        )
    if options.onto is not None and _MANY.fullmatch(options.onto) and not options.all:
        raise UsageError(f"--onto {options.onto} needs --all", "give one release")


def _rebase(project: Project, upstream: str) -> Rebase:
    project.pins.upstream(upstream)
    access = project.access
    mirror = Path(access.mirrors.get(upstream, ""))
    history = mirror if access.mirrors.get(upstream) and mirror.is_dir() else None
    return Rebase(project.root, project.pins_path, project.store, access, upstream, history)


# -- a rebase ------------------------------------------------------------------------------


def _one(options: Options, project: Project, upstream: str) -> int:
    job = Job(project.root, upstream)
    if options.abort:
        project.pins.upstream(upstream)
        there = job.folder.exists()
        job.remove()
        log.info(
            f"{upstream}: {'cancelled' if there else 'no rebase in progress'}; pins.yaml"
            " and the series are as they were"
        )
        if options.output.json:
            log.json({"aborted": there})
        return 0
    rebase = _rebase(project, upstream)
    now = job.load()
    if options.onto is not None:
        if now is not None and now.word != options.onto:
            msg = f"{upstream}: a rebase onto {now.word} is in progress"
            raise UsageError(msg, "build.py rebase UPSTREAM --continue, or --abort")
        if now is not None and options.commit is not None:
            _commit(rebase, now, options.commit)
        now = now or rebase.begin(options.onto, options.commit)
    elif options.go_on or options.skip is not None:
        now = _answer(options, rebase, now)
    else:
        return _status(upstream, job, now, as_json=options.output.json)
    rebase.check_same(now)
    try:
        rebase.run(now)
    finally:
        _print(now)
    landed = land(rebase, now)
    for path in landed.changed:
        log.info(f"changed: {path.relative_to(rebase.root)}")
    _say(landed.companions)
    log.info(f"report: {landed.report}")
    tested = testing.run(rebase.root, rebase.store, now) if options.test else None
    if tested is None:
        log.info("next: run the patches' tests (--test runs them at the end of a rebase)")
    log.info(f"docs/carry.md describes the old release; update it: build.py {carry.COMMAND}")
    if options.output.json:
        log.json(
            _document(now, landed.companions)
            | {
                "landed": True,
                "report": str(landed.report),
                "changed": [str(path) for path in landed.changed],
                "tests": None if tested is None else [one.as_json() for one in tested],
            }
        )
    return testing.verdict(tested or [])


def _answer(options: Options, rebase: Rebase, now: State | None) -> State:
    if now is None:
        msg = f"{rebase.upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto release:VERSION")
    rebase.check_same(now)
    if options.commit is not None:
        _commit(rebase, now, options.commit)
    leg = now.stopped
    if options.skip is not None:
        if leg is None:
            raise UsageError(f"{rebase.upstream}: no patch is stopped", "use --continue")
        rebase.skip(now, leg, " ".join(options.skip.split()))  # one line of the changelog
    elif leg is not None:
        rebase.resolve(now, leg)
    return now


def _commit(rebase: Rebase, now: State, commit: str) -> None:
    own = now.legs[0]
    onto.check_commit(own.goal, commit, now.stated)
    own.goal = own.goal.model_copy(update={"commit": commit})
    rebase.job.save(now)


def _status(upstream: str, job: Job, now: State | None, *, as_json: bool) -> int:
    if now is None:
        log.info(f"{upstream}: no rebase is in progress; start one: --onto release:VERSION")
        if as_json:
            log.json({"upstream": upstream, "under_way": False})
        return 0
    _print(now)
    if as_json:
        log.json(_document(now, ()) | {"under_way": True})
    if now.stopped is not None:
        return log.failure(stopped(job, now.stopped))
    log.info(f"{upstream}: onto {now.word} was interrupted; use --continue")
    return 0


def _every_status(project: Project, *, as_json: bool) -> int:
    jobs = {name: Job(project.root, name).load() for name in project.pins.upstreams}
    found = {name: now for name, now in jobs.items() if now is not None}
    for name, now in found.items():
        leg = now.stopped
        where = f"stopped at {leg.stopped.patch}" if leg and leg.stopped else "interrupted"
        log.info(f"{name}: onto {now.word}: {where}")
    if not found:
        log.info("no rebase is in progress")
    if as_json:
        log.json({name: _document(now, ()) for name, now in found.items()})
    return 0


# -- what would become of it -----------------------------------------------------------------


def _dry_run(project: Project, upstream: str, word: str, *, as_json: bool) -> int:
    rebase, loaded = _rebase(project, upstream), project.pins
    pinned = loaded.upstream(upstream)
    goal = onto.resolve(rebase.store, loaded, upstream, word, rebase.access, complete=True)
    old = onto.old_source(rebase.store, upstream, pinned, goal, rebase.access)
    one = rebase.series_of(upstream)
    moves = verdicts(
        rebase.store, one, old, goal.source, history=rebase.history, rules=pinned.paths
    )
    place = companions.Place(loaded, rebase.root, rebase.store, rebase.access)
    found = companions.disagreements(place, goal.upstream, goal.source, old)
    found += companions.unknown(upstream, goal.upstream, goal.stated, goal.lacking)
    _table(moves)
    _say(found)
    document = {
        "upstream": upstream,
        "from": pinned.tag,
        "onto": goal.upstream.tag,
        "patches": [move.as_json() for move in moves],
        "companions": [one.as_json() for one in found],
    }
    if as_json:
        log.json(document)
    return _verdict_code(moves)


def _all(options: Options, project: Project, word: str) -> int:
    many = _MANY.fullmatch(word)
    if many is None and word != "latest":
        raise UsageError(f"--all --onto {word}", "give --onto latest, or latest:N")
    chosen = chosen_series(None, project.root, project.pins)
    count = int(many[1]) if many else 1
    found = carry.carried(project.store, project.pins, chosen, project.access, count)
    for one in found:
        log.heading(one.series.upstream)
        log.table(carry.rows(one))
    if options.output.json:
        log.json({one.series.upstream: one.as_json() for one in found})
    if options.table:
        wanted = {project.root / "docs" / "carry.md": carry.page(found)}
        for page in generated.settle(wanted, carry.COMMAND, check=False):
            log.info(f"{page}: written")
        return 0
    newest = [one.columns[-1].moves or () for one in found]
    return max((_verdict_code(list(moves)) for moves in newest), default=0)


def _verdict_code(moves: list[Move]) -> int:
    if not any(move.stops for move in moves):
        return 0
    count = sum(move.stops for move in moves)
    log.error(f"{count} of {len(moves)} patches need work")
    return RebaseStopped.exit_code


# -- printing --------------------------------------------------------------------------------


def _print(now: State) -> None:
    for leg in now.legs:
        moves = [*leg.moves, *([leg.stopped] if leg.stopped else [])]
        if moves:
            log.heading(f"{leg.upstream}: {leg.pinned['tag']} → {now.word}")
            _table(moves)


def _table(moves: list[Move]) -> None:
    log.table([report.HEAD, *(report.row(move) for move in moves)] if moves else [])
    for move in moves:
        for text in (*move.detail, *move.culprits):
            log.info(f"{move.patch.removesuffix('.patch')}: {text}")


def _say(found: list[Companion] | tuple[Companion, ...]) -> None:
    for one in found:
        log.warning(f"{one.what}\n    hint: {one.mend}")


def _document(now: State, found: tuple[Companion, ...]) -> dict[str, Any]:
    return {
        "upstream": now.upstream,
        "onto": now.word,
        "series": {
            leg.upstream: {
                "patches": [move.as_json() for move in leg.moves],
                "stopped": leg.stopped.as_json() if leg.stopped else None,
            }
            for leg in now.legs
        },
        "companions": [one.as_json() for one in found],
    }
