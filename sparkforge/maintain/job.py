"""A rebase from start to end, in ``dist/rebase/UPSTREAM/``.

``plan.json`` says what moves where, and what a person answered; in ``tree/`` (``tree-NAME/`` of
another series) git rebases; ``checkout/`` is the throw-away one in which a move with companions is
tried. Where a run is killed while git works, the next one rebases again with rerere.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer

from sparkforge.core import git, plain
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import RebaseStopped, StoreError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain import drift, releases
from sparkforge.maintain.drift import Note
from sparkforge.maintain.findings import PatchResult
from sparkforge.maintain.mover import Mover, Progress
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN, Upstream
from sparkforge.series import series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source


def _pin(pin: Upstream) -> dict[str, Any]:
    """Return the values that a pin has: a default need not be a value that pins.yaml may have."""
    return pin.model_dump(mode="json", exclude_defaults=True)


@dataclass
class Part:
    """One series on its way."""

    upstream: str
    series: str
    """Its digest when the rebase began."""
    pinned: str
    """The pinned tag when the rebase began."""
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
            plan = plain.load(Plan, json.loads(path.read_text(encoding="utf-8")))
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

    def begin(self, spec: str, *, companions: bool) -> Plan:
        """Find the release and record the start and the goal of the rebase."""
        self.check_clean(companions)
        parts = list(self._parts(self.upstream, spec))
        if companions:
            needed = drift.moves(self.project, self.upstream, parts[0].target)
            for name, version in needed.items():
                log.info(f"{name} moves, too: {self.upstream} needs {version}")
                parts += self._parts(name, version)
        plan = Plan(self.upstream, spec, parts, companions)
        self.remove()  # of one that was killed before this
        self.save(plan)
        return plan

    def _parts(self, upstream: str, spec: str) -> Iterator[Part]:
        """Yield the rebase of an upstream's series, and of those whose sources it brings."""
        project, pinned = self.project, self.project.pins.upstream(upstream)
        if pinned.source_in is not None:
            msg = f"{upstream}: its sources are part of {pinned.source_in}'s wheels"
            raise UsageError(msg, f"rebase {pinned.source_in}: this series moves with it")
        release = releases.resolve(project, upstream, spec, complete=True)
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
        series.apply_recorded(self.project.store, own, old, upstream)
        return Part(name, own.sha256, upstream.tag, target, old, new, notes)

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
        loaded = pins.load(self.project.pins_path)
        for part in plan.parts:
            tag = loaded.upstream(part.upstream).tag
            if self.series_of(part.upstream).sha256 != part.series or tag != part.pinned:
                msg = f"{part.upstream}: the series or its pin changed after the rebase started"
                remedy = f"undo that change, or run build.py rebase {self.upstream} --abort"
                raise UsageError(msg, remedy)

    # -- moving --------------------------------------------------------------------------------

    def tree(self, upstream: str) -> Path:
        return self.folder / ("tree" if upstream == self.upstream else f"tree-{upstream}")

    def _mover(self, part: Part) -> Mover:
        memory = self.memory(part.upstream)
        memory.mkdir(parents=True, exist_ok=True)
        places = (self.tree(part.upstream), memory)
        ends, rules = (part.old, part.new), part.target.paths
        own = self.series_of(part.upstream)
        return Mover(self.project.store, own, ends, places, rules, part.progress)

    def move(self, plan: Plan, skip: str | None) -> None:
        """Move what is left, after a person's answer to the patch that stopped."""
        if skip is not None and not any(part.stopped for part in plan.parts):
            raise UsageError(f"{self.upstream}: no patch is stopped", "use --continue")
        for part in plan.parts:
            mover = self._mover(part)
            if part.done:  # a person may have amended it, after a trial
                if changed := mover.git("status", "--porcelain"):
                    msg = f"{mover.folder}: uncommitted changes:\n{changed}"
                    raise UsageError(msg, "commit them, into the patch that they belong to")
            elif part.stopped is None:
                mover.start()  # from the beginning: seconds, and no state of ours to lose
            elif skip is not None:
                part.progress.reasons[part.stopped] = skip
            else:
                mover.answer(part.stopped)
            part.stopped = None
            self.save(plan)  # killed from here on, the next run rebases again
            stop = mover.advance()
            part.stopped, part.done = None if stop is None else stop.patch, stop is None
            part.results = mover.results() if stop is None else []
            self.save(plan)
            if stop is not None:
                raise self.stop_of(part)

    def stop_of(self, part: Part) -> RebaseStopped:
        """Return the error of a rebase that waits for a person."""
        assert part.stopped is not None
        stop = part.progress.stops[part.stopped]
        lines = [f"{part.upstream}: {stop.patch}: {stop.verdict}"]
        lines += [f"  {text}" for text in stop.detail]
        lines += [f"  in conflict: {self.tree(part.upstream) / name}" for name in stop.files]
        command = f"build.py rebase {self.upstream}"
        remedy = f"merge both sides there; then {command} --continue, --skip REASON or --abort"
        return RebaseStopped("\n".join(lines), remedy)


@contextmanager
def locked(root: Path) -> Iterator[None]:
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
