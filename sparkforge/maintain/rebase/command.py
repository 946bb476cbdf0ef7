"""The command ``rebase``: what its options do, and what it prints."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from sparkforge.build.options import access_of, chosen_series, pins_path, store_of
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
from sparkforge.pins import pins

_MANY = re.compile(r"latest:([1-9][0-9]?)")


def run(options: argparse.Namespace) -> int:
    """Do what the words say; 19 where a person is needed."""
    _check_words(options)
    if options.all:
        return _all(options)
    if options.dry_run:
        return _dry_run(options)
    root = pins_path(options).parent
    with state.locked(root):
        if options.upstream is None:
            return _every_status(options, root)
        return _one(options)


def _check_words(options: argparse.Namespace) -> None:
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


def _rebase(options: argparse.Namespace) -> Rebase:
    path = pins_path(options)
    loaded = pins.load(path)
    loaded.upstream(options.upstream)
    access = access_of(options, loaded)
    mirror = Path(access.mirrors.get(options.upstream, ""))
    history = mirror if access.mirrors.get(options.upstream) and mirror.is_dir() else None
    return Rebase(path.parent, path, store_of(options), access, options.upstream, history)


# -- a rebase ------------------------------------------------------------------------------


def _one(options: argparse.Namespace) -> int:
    job = Job(pins_path(options).parent, options.upstream)
    if options.abort:
        pins.load(pins_path(options)).upstream(options.upstream)
        there = job.folder.exists()
        job.remove()
        log.info(
            f"{options.upstream}: {'cancelled' if there else 'no rebase in progress'}; pins.yaml"
            " and the series are as they were"
        )
        if options.json:
            log.json({"aborted": there})
        return 0
    rebase = _rebase(options)
    now = job.load()
    if options.onto is not None:
        if now is not None and now.word != options.onto:
            msg = f"{options.upstream}: a rebase onto {now.word} is in progress"
            raise UsageError(msg, "build.py rebase UPSTREAM --continue, or --abort")
        if now is not None and options.commit is not None:
            _commit(options, rebase, now)
        now = now or rebase.begin(options.onto, options.commit)
    elif options.go_on or options.skip is not None:
        now = _answer(options, rebase, now)
    else:
        return _status(options, job, now)
    rebase.check_same(now)
    try:
        rebase.run(now)
    finally:
        _print(options, now)
    landed = land(rebase, now)
    for path in landed.changed:
        log.info(f"changed: {path.relative_to(rebase.root)}")
    _say(landed.companions)
    log.info(f"report: {landed.report}")
    tested = testing.run(rebase.root, rebase.store, now) if options.test else None
    if tested is None:
        log.info("next: run the patches' tests (--test runs them at the end of a rebase)")
    log.info(f"docs/carry.md describes the old release; update it: build.py {carry.COMMAND}")
    if options.json:
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


def _answer(options: argparse.Namespace, rebase: Rebase, now: State | None) -> State:
    if now is None:
        msg = f"{options.upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto release:VERSION")
    rebase.check_same(now)
    if options.commit is not None:
        _commit(options, rebase, now)
    leg = now.stopped
    if options.skip is not None:
        if leg is None:
            raise UsageError(f"{options.upstream}: no patch is stopped", "use --continue")
        rebase.skip(now, leg, " ".join(options.skip.split()))  # one line of the changelog
    elif leg is not None:
        rebase.resolve(now, leg)
    return now


def _commit(options: argparse.Namespace, rebase: Rebase, now: State) -> None:
    own = now.legs[0]
    onto.check_commit(own.goal, options.commit, now.stated)
    own.goal = own.goal.model_copy(update={"commit": options.commit})
    rebase.job.save(now)


def _status(options: argparse.Namespace, job: Job, now: State | None) -> int:
    if now is None:
        log.info(f"{options.upstream}: no rebase is in progress; start one: --onto release:VERSION")
        if options.json:
            log.json({"upstream": options.upstream, "under_way": False})
        return 0
    _print(options, now)
    if options.json:
        log.json(_document(now, ()) | {"under_way": True})
    if now.stopped is not None:
        error = stopped(job, now.stopped)
        log.error(str(error))
        return error.exit_code
    log.info(f"{options.upstream}: onto {now.word} was interrupted; use --continue")
    return 0


def _every_status(options: argparse.Namespace, root: Path) -> int:
    loaded = pins.load(pins_path(options))
    found = {name: now for name in loaded.upstreams if (now := Job(root, name).load()) is not None}
    for name, now in found.items():
        leg = now.stopped
        where = f"stopped at {leg.stopped.patch}" if leg and leg.stopped else "interrupted"
        log.info(f"{name}: onto {now.word}: {where}")
    if not found:
        log.info("no rebase is in progress")
    if options.json:
        log.json({name: _document(now, ()) for name, now in found.items()})
    return 0


# -- what would become of it -----------------------------------------------------------------


def _dry_run(options: argparse.Namespace) -> int:
    rebase = _rebase(options)
    loaded = pins.load(rebase.pins_path)
    pinned = loaded.upstream(options.upstream)
    goal = onto.resolve(
        rebase.store, loaded, options.upstream, options.onto, rebase.access, complete=True
    )
    old = onto.old_source(rebase.store, options.upstream, pinned, goal, rebase.access)
    one = rebase.series_of(options.upstream)
    moves = verdicts(
        rebase.store, one, old, goal.source, history=rebase.history, rules=pinned.paths
    )
    place = companions.Place(loaded, rebase.root, rebase.store, rebase.access)
    found = companions.disagreements(place, goal.upstream, goal.source, old)
    found += companions.unknown(options.upstream, goal.upstream, goal.stated, goal.lacking)
    _table(moves)
    _say(found)
    document = {
        "upstream": options.upstream,
        "from": pinned.tag,
        "onto": goal.upstream.tag,
        "patches": [move.as_json() for move in moves],
        "companions": [one.as_json() for one in found],
    }
    if options.json:
        log.json(document)
    return _verdict_code(moves)


def _all(options: argparse.Namespace) -> int:
    many = _MANY.fullmatch(options.onto)
    if many is None and options.onto != "latest":
        raise UsageError(f"--all --onto {options.onto}", "give --onto latest, or latest:N")
    path = pins_path(options)
    loaded = pins.load(path)
    options.upstream = None
    chosen = chosen_series(options, path.parent, loaded)
    count = int(many[1]) if many else 1
    found = carry.carried(store_of(options), loaded, chosen, access_of(options, loaded), count)
    for one in found:
        log.heading(one.series.upstream)
        log.table(carry.rows(one))
    if options.json:
        log.json({one.series.upstream: one.as_json() for one in found})
    if options.table:
        wanted = {path.parent / "docs" / "carry.md": carry.page(found)}
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


def _print(options: argparse.Namespace, now: State) -> None:
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
