"""A rebase from start to end: ``dist/rebase/UPSTREAM/`` next to pins.yaml.

::

    plan.json     what moves where, and a person's answers; replaced as a whole
    tree/         the repository in which git rebases the upstream's own series
    tree-NAME/    of another series, whose sources are among its release files, or a companion's
    memory/       resolutions made here; moved to the series when the rebase lands
    checkout/     with companions: the throw-away checkout in which all of it is tried

git's state is the state of the merge. Where a run is killed while git works, the next one rebases
again and takes the answers that are in the plan.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer

from sparkforge.core import git, plain
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import RebaseStopped, SeriesError, StoreError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.companions import demands
from sparkforge.maintain.rebase import mover, release_spec
from sparkforge.maintain.rebase.mover import Mover, Progress
from sparkforge.maintain.rebase.tree import Tree
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN, Upstream
from sparkforge.series import lint, series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source


def _given(pin: Upstream) -> dict[str, Any]:
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
    target: Annotated[Upstream, PlainSerializer(_given)]
    """The upstream as pins.yaml will have it."""
    old: Source
    new: Source
    """``old``, ``new``: the sources."""
    lacking: tuple[str, ...] = ()
    """Names of files for which the index has none of the new release."""
    declared_commit: str | None = None
    """The commit that the release names."""
    progress: Progress = field(default_factory=Progress)
    stopped: str | None = None
    """The patch that waits for a person."""
    done: bool = False
    """All patches moved: the tree's HEAD is the result."""
    results: list[PatchResult] = field(default_factory=list)
    """Of the patches that are done, and of the one that is stopped."""


@dataclass
class Plan:
    """A rebase in progress."""

    upstream: str
    spec: str
    """The requested release (``--onto``)."""
    parts: list[Part]
    """The upstream's own series first."""
    companions: bool = False
    """What the release demands moves, too, and all of it is tried before it lands."""

    @property
    def moved(self) -> dict[str, Upstream]:
        """The upstreams that get another release, as pins.yaml will have them."""
        return {part.upstream: part.target for part in self.parts if not part.target.source_in}

    @property
    def stopped(self) -> Part | None:
        """The part that waits for a person."""
        return next((part for part in self.parts if part.stopped is not None), None)


@dataclass(frozen=True)
class Job:
    """One upstream's rebase in a checkout."""

    project: Project
    upstream: str
    history: Path | None = None
    """A repository with upstream's history, where a mirror is one."""

    @property
    def folder(self) -> Path:
        return self.project.root / "dist" / "rebase" / self.upstream

    def tree(self, part: Part) -> Path:
        own = part.upstream == self.upstream
        return self.folder / ("tree" if own else f"tree-{part.upstream}")

    def series_of(self, upstream: str) -> Series:
        return series.read(self.project.series_folder(upstream))

    # -- the plan ------------------------------------------------------------------------------

    def load(self) -> Plan | None:
        """Return the rebase in progress; None if there is none.

        Raises:
            StoreError: its file cannot be read, or another version wrote it.
        """
        path = self.folder / "plan.json"
        try:
            plan = plain.load(Plan, plain.json_of(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, OSError):
            plan = None
        if plan is None:
            msg = f"{path}: not the plan of a rebase of this version of sparkforge"
            raise StoreError(msg, f"start again: build.py rebase {self.upstream} --abort")
        return plan

    def save(self, plan: Plan) -> None:
        """Replace the plan as a whole."""
        text = json.dumps(plain.as_json(plan), indent=1, sort_keys=True)
        write_file(self.folder / "plan.json", text.encode())

    def remove(self) -> bool:
        """Remove all of it; returns whether there was any. A kill in between leaves no plan."""
        if not self.folder.exists():
            return False
        with disk_errors(self.folder):
            gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=self.folder.parent))
            self.folder.rename(gone / "it")
            shutil.rmtree(gone)
        return True

    def begin(self, spec: str, commit: str | None, *, companions: bool) -> Plan:
        """Find the release and record the start and the goal of the rebase.

        Raises:
            UsageError: the checkout has changes of its own, or no such release is known.
            IntegrityError: the series differs from its record in pins.yaml.
        """
        self.check_unchanged(companions=companions)
        parts = self._parts(self.upstream, spec, commit)
        if companions:
            wanted = demands.of_release(self.project, self.upstream, parts[0].target)
            for name, version in demands.moves(self.project, wanted).items():
                log.info(f"{name} moves, too: {self.upstream} needs {version}")
                parts += self._parts(name, f"release:{version}", None)
        plan = Plan(self.upstream, spec, parts, companions)
        shutil.rmtree(self.folder, ignore_errors=True)  # of one that was killed before this
        self.save(plan)
        return plan

    def _parts(self, upstream: str, spec: str, commit: str | None) -> list[Part]:
        """Return the rebase of an upstream's series, and of those whose sources it brings."""
        project, loaded = self.project, self.project.pins
        pinned = loaded.upstream(upstream)
        if pinned.source_in is not None:
            msg = f"{upstream}: its sources are part of {pinned.source_in}'s wheels"
            raise UsageError(msg, f"rebase {pinned.source_in}: this series moves with it")
        release = release_spec.resolve(project, upstream, spec, complete=True)
        target = release.upstream
        if target.tag == pinned.tag:
            raise UsageError(f"{upstream}: {pinned.tag} is pinned already", "name another release")
        if commit is not None:
            release_spec.check_commit(target, commit, release.declared_commit)
            target = target.model_copy(update={"commit": commit})
        old = release_spec.old_source(project, upstream, release)
        own = self._part(upstream, target, old, release.source)
        parts = [replace(own, lacking=release.lacking, declared_commit=release.declared_commit)]
        here = replace(project.access, mirrors={})
        for name, other in loaded.upstreams.items():
            key = other.source_file
            if other.source_in == upstream and key is not None and key in target.files:
                files = {**other.files, key: target.files[key]}
                fresh = other.model_copy(update={"files": files, "patched": {}})
                old, new = (
                    sources.ensure(project.store, name, pin, RELEASE_PLAN, here)
                    for pin in (other, fresh)
                )
                parts.append(self._part(name, fresh, old, new))
        return parts

    def _part(self, name: str, target: Upstream, old: Source, new: Source) -> Part:
        """Return the rebase of a series, which must agree with pins.yaml."""
        own, upstream = self.series_of(name), self.project.pins.upstreams[name]
        if problems := lint.lint(own, self.project.root, upstream.paths):
            raise SeriesError("\n".join(problems), "fix the series, then rebase it")
        series.apply_recorded(self.project.store, own, old, upstream)
        return Part(name, own.sha256, upstream.model_dump(mode="json"), target, old, new)

    def check_unchanged(self, *, companions: bool) -> None:
        """Refuse a checkout with changes in files that a rebase writes.

        Raises:
            UsageError: a file there is not committed.
        """
        root = self.project.root
        if not git.git_ok(root, "rev-parse", "--is-inside-work-tree"):
            return  # not under git: nothing to compare with
        written = ["pins.yaml", "patches", "CHANGELOG.md", "docs/patches.md"]
        written += ["requirements"] if companions else []
        if changed := git.git(root, "status", "--porcelain", "--", *written):
            msg = f"{root}: uncommitted changes:\n{changed}"
            raise UsageError(msg, "commit, stash or restore them: a rebase replaces these files")

    def check_same(self, plan: Plan) -> None:
        """Refuse to continue if the series or its pin has changed since the rebase began.

        Raises:
            UsageError: it has changed.
        """
        loaded = pins.load(self.project.pins_path)
        for part in plan.parts:
            pinned = loaded.upstream(part.upstream).model_dump(mode="json")
            if self.series_of(part.upstream).sha256 != part.series or pinned != part.pinned:
                msg = f"{part.upstream}: the series or its pin changed after the rebase started"
                remedy = f"undo that change, or run build.py rebase {self.upstream} --abort"
                raise UsageError(msg, remedy)

    # -- moving --------------------------------------------------------------------------------

    def run(self, plan: Plan) -> None:
        """Move what is left; RebaseStopped if a patch needs a person."""
        for part in plan.parts:
            mover_of = self._mover(part)
            tree = Tree.make(self.tree(part), part.new.repo)
            if not part.done and part.stopped is None:
                mover_of.start(tree)  # from the beginning: seconds, and no state of ours to lose
                self._advance(plan, part, mover_of, tree)
            if part.stopped is not None:
                raise self.stop_of(part)
            part.results = mover_of.results(tree, part.progress)
            self.save(plan)

    def _advance(self, plan: Plan, part: Part, mover_of: Mover, tree: Tree) -> None:
        part.progress.remembered.clear()
        stop = mover_of.advance(tree, part.progress)
        part.results = mover_of.results(tree, part.progress)
        part.stopped = None if stop is None else stop.result.patch
        part.done = stop is None
        self.save(plan)

    def _mover(self, part: Part) -> Mover:
        own, paths = self.series_of(part.upstream), part.target.paths
        store = self.project.store
        return Mover.of(store, own, part.old, part.new, paths, self.history)

    def answer(self, plan: Plan, skip: str | None) -> None:
        """Take a person's answer: a reason to leave the stopped patch out, or the work trees.

        Raises:
            UsageError: something is not resolved or not committed.
        """
        part = plan.stopped
        if part is None:
            if skip is not None:
                raise UsageError(f"{self.upstream}: no patch is stopped", "use --continue")
            self._check_amended(plan)
            return
        assert part.stopped is not None
        tree, progress = Tree.make(self.tree(part), part.new.repo), part.progress
        stop = progress.stops[part.stopped]
        commits = self._mover(part).commits
        at = tree.stopped
        if at is None:  # a person ran git rebase --continue to its end
            part.done = True
            made = tree.moved(part.new.commit).get(part.stopped)
            if made is not None:
                progress.answers[part.stopped] = made
            else:
                progress.reasons[part.stopped] = "left out by hand"
        elif commits[at].name != part.stopped:
            msg = f"{tree.path}: git has gone on to {commits[at].name}"
            raise UsageError(msg, f"finish it: git -C {tree.path} rebase --continue")
        elif skip is not None:
            progress.reasons[part.stopped] = skip
        else:
            progress.answers[part.stopped], kept = mover.resolved(tree, stop)
            for name, data in kept.items():
                write_file(self.folder / "memory" / part.upstream / name, data)
        part.stopped = None
        self.save(plan)

    def _check_amended(self, plan: Plan) -> None:
        """Check the commits that a person may have made of moved patches, after a trial."""
        for part in plan.parts:
            if not part.done:
                continue
            tree = Tree(self.tree(part))
            if changed := tree.git("status", "--porcelain"):
                msg = f"{tree.path}: uncommitted changes:\n{changed}"
                raise UsageError(msg, "commit them, into the patch that they belong to")
            if not git.git_ok(tree.path, "merge-base", "--is-ancestor", part.new.commit, "HEAD"):
                msg = f"{tree.path}: HEAD does not stand on {part.new.commit[:12]}, the new release"
                raise UsageError(msg, "git reflog has the commit that does")

    def stop_of(self, part: Part) -> RebaseStopped:
        """Return the error of a rebase that waits for a person."""
        assert part.stopped is not None
        stop = part.progress.stops[part.stopped]
        result = stop.result
        lines = [f"{part.upstream}: {result.patch}: {result.verdict.value}"]
        lines += [f"  {text}" for text in (*result.detail, *result.causes)]
        lines += [f"  in conflict: {self.tree(part) / name}" for name in stop.files]
        command = f"build.py rebase {self.upstream}"
        remedy = f"{result.next}; then {command} --continue, --skip REASON or --abort"
        return RebaseStopped("\n".join(lines), remedy)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a checkout's rebases: they all write pins.yaml.

    Raises:
        UsageError: another rebase is running in this checkout.
    """
    from filelock import FileLock, Timeout

    folder = root / "dist" / "rebase"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            msg = f"{root}: another rebase is running in this checkout"
            raise UsageError(msg, "wait for it, or stop it") from None
    try:
        for left in folder.glob(".gone-*"):  # of an --abort that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()
