"""``rebase``: move a series to another release, from start to landing.

``dist/rebase/UPSTREAM/`` is the state: ``plan.json`` says what moves where, and what a person
answered; in ``tree/`` (``tree-NAME/`` of another series) git rebases; ``checkout/`` is the
throw-away one in which a move with companions is tried. Where a run is killed while git works, the
next one rebases again and takes the answers of the plan.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import PlainSerializer

from sparkforge.build.options import OutputOptions
from sparkforge.core import git, plain
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import RebaseStopped, SeriesError, StoreError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import companions, drift, landing, releases
from sparkforge.maintain.drift import Note
from sparkforge.maintain.mover import HEAD, Mover, PatchResult, Progress, dry_run
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN, Upstream
from sparkforge.series import lint, series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.sources.sources import Source


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``rebase``."""

    upstream: str = field(kw_only=False)
    """upstream whose series to move"""
    onto: str | None = None
    """new base: TAG, full commit SHA, release:VERSION, release:FILE or latest"""
    dry_run: bool = False
    """show the result without changing files"""
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


def _pin(pin: Upstream) -> dict[str, Any]:
    """Return the values that a pin has: a default need not be a value that pins.yaml may have."""
    return pin.model_dump(mode="json", exclude_defaults=True)


@dataclass
class Part:
    """One series on its way."""

    upstream: str
    series: str
    """Its digest when the rebase began."""
    pinned: Mapping[str, Any]
    """The upstream's pin when the rebase began, as JSON."""
    target: Annotated[Upstream, PlainSerializer(_pin)]
    """The upstream as pins.yaml will have it."""
    old: Source
    new: Source
    notes: tuple[Note, ...] = ()
    """What is unknown of the release."""
    progress: Progress = field(default_factory=Progress)
    stopped: str | None = None
    """The patch that waits for a person."""
    done: bool = False
    """All patches moved: the tree's HEAD is the result."""
    results: list[PatchResult] = field(default_factory=list)


@dataclass
class Plan:
    """A rebase in progress."""

    upstream: str
    spec: str
    """The requested release (``--onto``)."""
    parts: list[Part]
    """The upstream's own series first."""
    companions: bool = False

    @property
    def moved(self) -> dict[str, Upstream]:
        """The upstreams that get another release, as pins.yaml will have them."""
        return {part.upstream: part.target for part in self.parts if not part.target.source_in}


@dataclass(frozen=True)
class Job:
    """One upstream's rebase in a checkout."""

    project: Project
    upstream: str

    @property
    def folder(self) -> Path:
        return self.project.root / "dist" / "rebase" / self.upstream

    def memory(self, upstream: str) -> Path:
        """Return the folder of git's rerere cache, which outlives the rebase."""
        return self.folder.parent / "rerere" / upstream

    def series_of(self, upstream: str) -> Series:
        return series.read(self.project.series_folder(upstream))

    def load(self) -> Plan | None:
        """Return the rebase in progress; None if there is none."""
        path = self.folder / "plan.json"
        if not path.is_file():
            return None
        try:
            plan = plain.load(Plan, plain.json_of(path.read_text(encoding="utf-8")))
        except (ValueError, OSError):
            plan = None
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
        with disk_errors(self.folder):
            (self.folder / "plan.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        return there

    def begin(self, spec: str, commit: str | None, *, companions: bool) -> Plan:
        """Find the release and record the start and the goal of the rebase."""
        self.check_clean(companions)
        parts = list(self._parts(self.upstream, spec, commit))
        if companions:
            needed = drift.moves(self.project, self.upstream, parts[0].target)
            for name, version in needed.items():
                log.info(f"{name} moves, too: {self.upstream} needs {version}")
                parts += self._parts(name, f"release:{version}", None)
        plan = Plan(self.upstream, spec, parts, companions)
        self.remove()  # of one that was killed before this
        self.save(plan)
        return plan

    def _parts(self, upstream: str, spec: str, commit: str | None) -> Iterator[Part]:
        """Yield the rebase of an upstream's series, and of those whose sources it brings."""
        project, pinned = self.project, self.project.pins.upstream(upstream)
        if pinned.source_in is not None:
            msg = f"{upstream}: its sources are part of {pinned.source_in}'s wheels"
            raise UsageError(msg, f"rebase {pinned.source_in}: this series moves with it")
        release = releases.resolve(project, upstream, spec, complete=True, commit=commit)
        target = release.upstream
        if target.tag == pinned.tag:
            raise UsageError(f"{upstream}: {pinned.tag} is pinned already", "name another release")
        yield self._part(upstream, target, release.old, release.source, release.notes)
        access = replace(project.access, mirrors={})
        for name, other in project.pins.upstreams.items():
            key = other.source_file
            if other.source_in == upstream and key is not None and key in target.files:
                files = {**other.files, key: target.files[key]}
                fresh = other.model_copy(update={"files": files, "patched": {}})
                old, new = (
                    sources.ensure(project.store, name, pin, RELEASE_PLAN, access)
                    for pin in (other, fresh)
                )
                yield self._part(name, fresh, old, new)

    def _part(
        self, name: str, target: Upstream, old: Source, new: Source, notes: tuple[Note, ...] = ()
    ) -> Part:
        own, upstream = self.series_of(name), self.project.pins.upstreams[name]
        if problems := lint.lint(own, self.project.root, upstream.paths):
            raise SeriesError("\n".join(problems), "fix the series, then rebase it")
        series.apply_recorded(self.project.store, own, old, upstream)
        pinned = upstream.model_dump(mode="json")
        return Part(name, own.sha256, pinned, target, old, new, notes)

    def check_clean(self, companions: bool) -> None:
        """Refuse a checkout with uncommitted changes in files that a rebase writes."""
        root = self.project.root
        written = ["pins.yaml", "patches", "CHANGELOG.md", "docs/patches.md"]
        written += ["requirements"] if companions else []
        words = ("status", "--porcelain", "--", *written)
        if git.git_ok(root, "rev-parse") and (changed := git.git(root, *words)):
            msg = f"{root}: uncommitted changes:\n{changed}"
            raise UsageError(msg, "commit, stash or restore them: a rebase replaces these files")

    def check_same(self, plan: Plan) -> None:
        """Refuse to continue if a series or its pin has changed since the rebase began."""
        loaded = pins.load(self.project.pins_path)
        for part in plan.parts:
            pinned = loaded.upstream(part.upstream).model_dump(mode="json")
            if self.series_of(part.upstream).sha256 != part.series or pinned != part.pinned:
                msg = f"{part.upstream}: the series or its pin changed after the rebase started"
                remedy = f"undo that change, or run build.py rebase {self.upstream} --abort"
                raise UsageError(msg, remedy)

    # -- moving --------------------------------------------------------------------------------

    def tree(self, upstream: str) -> Path:
        return self.folder / ("tree" if upstream == self.upstream else f"tree-{upstream}")

    def _mover(self, part: Part) -> Mover:
        memory = self.memory(part.upstream)
        memory.mkdir(parents=True, exist_ok=True)
        own, store = self.series_of(part.upstream), self.project.store
        tree, rules = self.tree(part.upstream), part.target.paths
        return Mover(store, own, part.old, part.new, tree, memory, rules, part.progress)

    def move(self, plan: Plan, skip: str | None) -> None:
        """Move what is left, after a person's answer to the patch that stopped.

        Raises:
            RebaseStopped: a patch needs a person.
            UsageError: something is not resolved, or not committed.
        """
        if skip is not None and not any(part.stopped for part in plan.parts):
            raise UsageError(f"{self.upstream}: no patch is stopped", "use --continue")
        for part in plan.parts:
            mover = self._mover(part)
            if part.done:
                _check_amended(mover)  # a person may have, after a trial
            elif part.stopped is None:
                mover.start()  # from the beginning: seconds, and no state of ours to lose
            elif skip is not None:
                part.progress.reasons[part.stopped] = skip
            else:
                mover.answer(part.stopped)
            part.stopped = None
            self.save(plan)  # killed from here on, the next run rebases again
            stop = mover.advance()
            part.stopped, part.done = None if stop is None else stop.result.patch, stop is None
            part.results = mover.results() if stop is None else []
            self.save(plan)
            if stop is not None:
                raise self.stop_of(part)

    def stop_of(self, part: Part) -> RebaseStopped:
        """Return the error of a rebase that waits for a person."""
        assert part.stopped is not None
        stop = part.progress.stops[part.stopped]
        lines = [f"{part.upstream}: {stop.result.patch}: {stop.result.verdict}"]
        lines += [f"  {text}" for text in stop.result.detail]
        lines += [f"  in conflict: {self.tree(part.upstream) / name}" for name in stop.files]
        command = f"build.py rebase {self.upstream}"
        remedy = f"{stop.result.next}; then {command} --continue, --skip REASON or --abort"
        return RebaseStopped("\n".join(lines), remedy)


def _check_amended(mover: Mover) -> None:
    if changed := mover.git("status", "--porcelain"):
        msg = f"{mover.folder}: uncommitted changes:\n{changed}"
        raise UsageError(msg, "commit them, into the patch that they belong to")
    if not git.git_ok(mover.folder, "merge-base", "--is-ancestor", mover.new, "HEAD"):
        msg = f"{mover.folder}: HEAD does not stand on {mover.new[:12]}, the new release"
        raise UsageError(msg, "git reflog has the commit that does")


# -- the command ---------------------------------------------------------------------------------


def run(options: Options) -> int:
    """Move a series, or report on a move; 6 where a patch needs work."""
    answers = [options.onto is not None, options.go_on, options.skip is not None, options.abort]
    wrong = {
        "--onto, --continue, --skip and --abort exclude each other": sum(answers) > 1,
        "--dry-run, --commit and --with-companions need --onto": options.onto is None
        and (options.dry_run or options.commit or options.companions),
        "--onto is empty": options.onto is not None and not options.onto.strip(),
        "--skip needs a reason": options.skip is not None and not options.skip.strip(),
        "--commit needs 40 digits": not re.fullmatch(r"[0-9a-f]{40}", options.commit or "0" * 40),
        "a dry run conflicts with --commit and --with-companions": options.dry_run
        and (options.commit or options.companions),
    }
    for what, found in wrong.items():
        if found:
            raise UsageError(what, "see build.py rebase --help")
    project = Project.open(options.project)
    project.pins.upstream(options.upstream)
    job = Job(project, options.upstream)
    if options.onto is not None and options.dry_run:
        return _dry_run(job, options.onto)
    with _locked(project.root):
        return _move(options, job)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a checkout's rebases: they all write pins.yaml."""
    from filelock import FileLock, Timeout

    folder = root / "dist" / "rebase"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock").acquire(timeout=0):
            yield
    except Timeout:
        msg = f"{root}: another rebase is running in this checkout"
        raise UsageError(msg, "wait for it, or stop it") from None


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
        plan = plan or job.begin(options.onto, options.commit, companions=options.companions)
    elif not options.go_on and options.skip is None:
        return _status(job, plan)
    elif plan is None:
        msg = f"{upstream}: no rebase is in progress"
        raise UsageError(msg, "start one: --onto release:VERSION")
    job.check_same(plan)
    try:
        job.move(plan, None if options.skip is None else " ".join(options.skip.split()))
    finally:
        _print(plan)
    tried = None
    if plan.companions:
        with job.project.locked() as held:  # not longer: a trial takes minutes
            planned = landing.planned(job, held, plan)
        tried = companions.tried(held, planned, plan, job.folder / "checkout")
    page, changed, notes = landing.land(job, plan, tried)
    for path in changed:
        log.info(f"changed: {path.relative_to(job.project.root)}")
    _say(notes)
    log.info(f"report: {page}")
    if tried is None:
        log.info("next: run the patches' tests (--with-companions runs them before it lands)")
    tests = None if tried is None else [test.as_json() for test in tried.tests]
    document = {"landed": True, "report": str(page), "changed": list(map(str, changed))}
    log.document(_document(plan, notes) | document | {"tests": tests})
    return 0


def _status(job: Job, plan: Plan | None) -> int:
    if plan is None:
        log.info(f"{job.upstream}: no rebase is in progress; start one: --onto release:VERSION")
        log.document({"upstream": job.upstream, "under_way": False})
        return 0
    _print(plan)
    log.document(_document(plan, ()) | {"under_way": True})
    for part in plan.parts:
        if part.stopped is not None:
            return log.failure(job.stop_of(part))
    log.info(f"{job.upstream}: onto {plan.spec}: interrupted, or its trial failed; use --continue")
    return 0


def _dry_run(job: Job, spec: str) -> int:
    project, upstream = job.project, job.upstream
    pinned, own = project.pins.upstream(upstream), job.series_of(upstream)
    release = releases.resolve(project, upstream, spec, complete=True)
    memory = job.memory(upstream)
    results = dry_run(project.store, own, release, pinned.paths, memory)
    notes = [*release.notes, *drift.find(project, upstream, release.upstream)]
    versions = {name: pin.version for name, pin in project.pins.upstreams.items()}
    notes += drift.droppable([own], versions | {upstream: release.upstream.version})
    table(results)
    _say(notes)
    document = {
        "upstream": upstream,
        "from": pinned.tag,
        "onto": release.upstream.tag,
        "patches": [result.as_json() for result in results],
    }
    log.document(document | {"companions": _as_json(notes)})
    if count := sum(result.stops for result in results):
        log.error(f"{count} of {len(results)} patches need work")
    return RebaseStopped.exit_code if count else 0


def _print(plan: Plan) -> None:
    for part in plan.parts:
        if part.results:
            log.heading(f"{part.upstream}: {part.pinned['tag']} → {part.target.tag}")
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


def _as_json(notes: Iterable[Note]) -> list[dict[str, str]]:
    return [{"what": what, "mend": hint} for what, hint in notes]


def _document(plan: Plan, notes: Iterable[Note]) -> dict[str, Any]:
    parts = {
        part.upstream: {
            "patches": [result.as_json() for result in part.results],
            "stopped": part.stopped,
        }
        for part in plan.parts
    }
    document = {"upstream": plan.upstream, "onto": plan.spec, "series": parts}
    return document | {"companions": _as_json(notes)}
