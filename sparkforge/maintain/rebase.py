"""``rebase``: move a series to another release, from start to landing, in ``dist/rebase/UPSTREAM``.

``plan.json`` says what moves where, and what a person answered; in ``tree/`` (``tree-NAME/`` of
another series) git rebases; ``checkout/`` is the throw-away one in which a move with companions is
tried. Where a run is killed while git works, the next one rebases again with rerere.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions, command_options
from sparkforge.core import git, plain
from sparkforge.core.disk import disk_errors, read_json, write_file
from sparkforge.core.errors import RebaseStopped, StoreError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import landing, mover, releases
from sparkforge.maintain.mover import Mover
from sparkforge.maintain.releases import Move, Note, PatchResult
from sparkforge.pins.pins import Upstream
from sparkforge.series import series
from sparkforge.sources.project import Project, ProjectOptions


@command_options
class Options:
    upstream: str = field(kw_only=False)
    """upstream whose series to move"""
    onto: str | None = None
    """new base: a version on the package index, or its tag"""
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
    from filelock import FileLock, Timeout

    answers = [options.onto is not None, options.go_on, options.skip is not None, options.abort]
    wrong = {
        "--onto, --continue, --skip and --abort exclude each other": sum(answers) > 1,
        "give --dry-run or --with-companions with --onto": options.dry_run + options.companions
        > (options.onto is not None),
        "--mirror: a rebase takes release files": bool(options.project.mirror),
        "--skip needs a reason": options.skip is not None and not options.skip.strip(),
    }
    for what, found in wrong.items():
        if found:
            raise UsageError(what, "see build.py rebase --help")
    project = Project.open(options.project)
    project.pins.upstream(options.upstream)
    if options.onto is not None and options.dry_run:
        return _dry_run(project, options.upstream, options.onto)
    job = Job(project, options.upstream)
    with disk_errors(job.folder.parent):
        job.folder.parent.mkdir(parents=True, exist_ok=True)
    try:  # one at a time in a checkout: they all write pins.yaml
        with FileLock(job.folder.parent / "lock").acquire(timeout=0):
            return _move(options, job)
    except Timeout:
        msg = f"{project.root}: another rebase is running in this checkout"
        raise UsageError(msg, "wait for it, or stop it") from None


def _move(options: Options, job: "Job") -> int:
    upstream = job.upstream
    if options.abort:
        there = job.remove()
        log.info(f"{upstream}: {'cancelled' if there else 'no rebase in progress'}")
        log.document({"aborted": there})
        return 0
    plan, answered = job.load(), options.go_on or options.skip is not None
    if plan is None and answered:
        raise UsageError(f"{upstream}: no rebase is in progress", "start one: --onto VERSION")
    if plan is not None and options.onto not in (None, plan.spec):
        msg = f"{upstream}: a rebase onto {plan.spec} is in progress"
        raise UsageError(msg, f"build.py rebase {upstream} --continue, or --abort")
    if plan is not None and not answered and (waiting := job.waiting(plan)):
        raise waiting
    if options.onto is None and not answered:
        state = "no rebase is in progress; start one: --onto VERSION"
        if plan is not None:
            state = f"onto {plan.spec}: interrupted, or its trial failed; use --continue"
        log.info(f"{upstream}: {state}")
        log.document({"upstream": upstream, "under_way": plan is not None})
        return 0
    plan = plan or job.begin(str(options.onto), companions=options.companions)
    job.check_same(plan)
    results = job.move(plan, None if options.skip is None else " ".join(options.skip.split()))
    changed, notes, trial = landing.land(job, plan, results)
    for path in changed:
        log.info(f"changed: {path.relative_to(job.project.root)}")
    if not plan.companions:
        log.info("next: run the patches' tests (--with-companions runs them before it lands)")
    else:
        log.info("next: build.py ablate says which patches the new release no longer needs")
    moved = {name: {"patches": list(map(asdict, found))} for name, found in results.items()}
    document = {"upstream": upstream, "onto": plan.spec, "series": moved} | _say(notes)
    document |= {"landed": True, "changed": list(map(str, changed))}
    log.document(document | {"tests": {}} | trial)
    return 0


def _dry_run(project: Project, upstream: str, spec: str) -> int:
    move = releases.resolve(project, upstream, spec)
    results = mover.dry_run(project, move)
    notes = [*move.notes, *releases.find(project, upstream, move.target)]
    own = series.read(project.series_folder(upstream))
    notes += landing.droppable([own], {**project.pins.upstreams, upstream: move.target})
    table(results)
    document = {"upstream": upstream, "onto": str(move.target.tag), "from": move.pinned}
    log.document(document | _say(notes) | {"patches": list(map(asdict, results))})
    if count := sum(result.stops for result in results):
        log.error(f"{count} of {len(results)} patches need work")
    return RebaseStopped.exit_code if count else 0


def table(results: list[PatchResult]) -> None:
    """Print results as a table, with their findings below it."""
    log.table([("patch", "verdict"), *(result.row() for result in results)] if results else [])
    for result in results:
        for text in result.detail:
            log.info(f"{result.patch.removesuffix('.patch')}: {text}")


def _say(notes: Iterable[Note]) -> dict[str, object]:
    """Print notes as warnings; returns them for the document."""
    for what, hint in notes:
        log.warning(f"{what}\n    hint: {hint}")
    return {"companions": [{"what": what, "mend": hint} for what, hint in notes]}


@dataclass
class Plan:
    """What moves where, and what people answered."""

    spec: str
    """The requested release (``--onto``)."""
    moves: list[Move]
    """The upstream's own series first."""
    companions: bool = False

    @property
    def moved(self) -> dict[str, Upstream]:
        """The upstreams that get another release, as pins.yaml will have them."""
        return {move.upstream: move.target for move in self.moves if not move.target.source_in}


@dataclass(frozen=True)
class Job:
    """One upstream's rebase in a checkout."""

    project: Project
    upstream: str

    @property
    def folder(self) -> Path:
        return self.project.root / "dist" / "rebase" / self.upstream

    def load(self) -> Plan | None:
        """Return the rebase in progress; None if there is none."""
        path = self.folder / "plan.json"
        if not path.is_file():
            return None
        plan = plain.load(Plan, read_json(path))
        if plan is None:
            msg = f"{path}: not the plan of a rebase of this version of sparkforge"
            raise StoreError(msg, f"start again: build.py rebase {self.upstream} --abort")
        return plan

    def save(self, plan: Plan) -> None:
        text = json.dumps(plain.as_json(plan), indent=1, sort_keys=True)
        write_file(self.folder / "plan.json", text.encode())

    def remove(self) -> bool:
        """Remove all of it, the plan first; returns whether there was any."""
        there = self.folder.exists()
        (self.folder / "plan.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        return there

    def begin(self, spec: str, *, companions: bool) -> Plan:
        """Find the release and record the start and the goal of the rebase."""
        self.check_clean(companions)
        moves = list(self._moves(self.upstream, spec))
        if companions:
            needed = releases.moves(self.project, self.upstream, moves[0].target)
            for name, version in needed.items():
                log.info(f"{name} moves, too: {self.upstream} needs {version}")
                moves += self._moves(name, version)
        plan = Plan(spec, moves, companions)
        self.remove()  # of one that was killed before this
        self.save(plan)
        return plan

    def _moves(self, upstream: str, spec: str) -> Iterator[Move]:
        """Yield the move of an upstream's series, and of those whose sources it brings."""
        project, pinned = self.project, self.project.pins.upstream(upstream)
        if pinned.source_in is not None:
            msg = f"{upstream}: its sources are part of {pinned.source_in}'s wheels"
            raise UsageError(msg, f"rebase {pinned.source_in}: this series moves with it")
        move = releases.resolve(project, upstream, spec)
        if move.target.tag == pinned.tag:
            raise UsageError(f"{upstream}: {pinned.tag} is pinned already", "name another release")
        yield move
        new = move.target.files
        for name, other in project.pins.upstreams.items():
            key = other.source_file
            if other.source_in == upstream and key is not None and key in new:
                files = {**other.files, key: new[key]}
                fresh = other.model_copy(update={"files": files, "patched": {}})
                yield releases.move_to(project, name, fresh)

    def check_clean(self, companions: bool) -> None:
        """Refuse a checkout with uncommitted changes in files that a rebase writes."""
        root, more = self.project.root, ["requirements"] if companions else []
        written = ["pins.yaml", "patches", "CHANGELOG.md", "docs/patches.md", *more]
        words = ("status", "--porcelain", "--", *written)
        if git.attempt(root, "rev-parse")[0] == 0 and (changed := git.git(root, *words)):
            msg = f"{root}: uncommitted changes:\n{changed}"
            raise UsageError(msg, "commit, stash or restore them: a rebase replaces these files")

    def check_same(self, plan: Plan) -> None:
        """Refuse to continue if a series or its pin has changed since the rebase began."""
        for move in plan.moves:
            tag = self.project.pins.upstream(move.upstream).tag
            own = series.read(self.project.series_folder(move.upstream))
            if own.sha256 != move.series or tag != move.pinned:
                msg = f"{move.upstream}: the series or its pin changed after the rebase started"
                remedy = f"undo that change, or run build.py rebase {self.upstream} --abort"
                raise UsageError(msg, remedy)

    def tree(self, upstream: str) -> Path:
        return self.folder / ("tree" if upstream == self.upstream else f"tree-{upstream}")

    def waiting(self, plan: Plan) -> RebaseStopped | None:
        """Return what waits for a person."""
        found = ((move, mover.stopped_in(self.tree(move.upstream))) for move in plan.moves)
        known = (self.stop_of(move, move.stops[name]) for move, name in found if name in move.stops)
        return next(known, None)

    def move(self, plan: Plan, skip: str | None) -> Mapping[str, list[PatchResult]]:
        """Move what is left, after a person's answer to the patch that stopped.

        Returns the results by upstream.
        """
        if skip is not None and self.waiting(plan) is None:
            raise UsageError(f"{self.upstream}: no patch is stopped", "use --continue")
        results = {}
        for move in plan.moves:
            tree = Mover(self.project, move, self.tree(move.upstream))
            tree.memory.mkdir(parents=True, exist_ok=True)
            name = mover.stopped_in(tree.folder)
            if not tree.started:
                tree.start()  # from the beginning: seconds, and no state of ours to lose
            elif name is not None and skip is not None:
                tree.skip(name, skip)
            elif name is not None:
                tree.answer(name)
            elif changed := tree.git("status", "--porcelain"):  # amended, after a trial
                msg = f"{tree.folder}: uncommitted changes:\n{changed}"
                raise UsageError(msg, "commit them, into the patch that they belong to")
            self.save(plan)
            stop = tree.advance()
            self.save(plan)
            if stop is not None:
                raise self.stop_of(move, stop)
            results[move.upstream] = tree.results()
            log.heading(f"{move.upstream}: {move.pinned} → {move.target.tag}")
            table(results[move.upstream])
        return results

    def stop_of(self, move: Move, stop: PatchResult) -> RebaseStopped:
        """Return the error of a rebase that waits for a person."""
        lines = [f"{move.upstream}: {stop.patch}: {stop.verdict}"]
        lines += [f"  {text}" for text in stop.detail]
        lines += [f"  in conflict: {self.tree(move.upstream) / name}" for name in stop.files]
        command = f"build.py rebase {self.upstream}"
        remedy = f"merge both sides there; then {command} --continue, --skip REASON or --abort"
        return RebaseStopped("\n".join(lines), remedy)
