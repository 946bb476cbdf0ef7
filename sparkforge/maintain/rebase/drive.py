"""A rebase from start to end: start, continue, resolve, skip, abort."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.core import git, gitread
from sparkforge.core.disk import write_file
from sparkforge.core.errors import RebaseStopped, SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.maintain.companions import demands
from sparkforge.maintain.rebase import release_spec
from sparkforge.maintain.rebase.patch_rebase import PatchRebaser
from sparkforge.maintain.rebase.resolutions import Memory
from sparkforge.maintain.rebase.state import Job, SeriesRebase, State
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.maintain.rebase.workspace import Workspace
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import lint, series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project

_MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |$)", re.MULTILINE)  # ======= may be a heading


@dataclass(frozen=True)
class Rebase:
    """The inputs of a rebase."""

    project: Project
    upstream: str
    history: Path | None = None
    """A repository with upstream's history, where a mirror is one."""

    @property
    def job(self) -> Job:
        return Job(self.project.root, self.upstream)

    def series_of(self, upstream: str) -> Series:
        return series.read(self.project.series_folder(upstream))

    # -- beginning ---------------------------------------------------------------------

    def begin(self, spec: str, commit: str | None, *, companions: bool = False) -> State:
        """Find the release and record the start and the goal of the rebase.

        Args:
            companions: move the other upstreams, too, whose pinned release it does not take.

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
        state = State(self.upstream, spec, parts, companions)
        shutil.rmtree(self.job.folder, ignore_errors=True)  # of one that was killed before this
        self.job.save(state)
        return state

    def _parts(self, upstream: str, spec: str, commit: str | None) -> list[SeriesRebase]:
        """Return the rebase of an upstream's series, and of those whose sources it brings."""
        project, loaded = self.project, self.project.pins
        pinned = loaded.upstream(upstream)
        if pinned.source_in is not None:
            msg = f"{upstream}: its sources are part of {pinned.source_in}'s wheels"
            raise UsageError(msg, f"rebase {pinned.source_in}: this series moves with it")
        release = release_spec.resolve(project, upstream, spec, complete=True)
        if commit is not None:
            release_spec.check_commit(release.upstream, commit, release.declared_commit)
            release = replace(
                release, upstream=release.upstream.model_copy(update={"commit": commit})
            )
        old = release_spec.old_source(project, upstream, release)
        parts = [
            SeriesRebase(
                upstream,
                self._applied(upstream, loaded, old).sha256,
                pinned.model_dump(mode="json"),
                release.upstream,
                old,
                release.source,
                release.lacking,
                release.declared_commit,
            )
        ]
        for name, other in loaded.upstreams.items():
            if other.source_in == upstream and other.source_file in release.upstream.files:
                parts.append(self._bundled(name, loaded, release))
        return parts

    def _bundled(self, name: str, loaded: pins.Pins, release: release_spec.Release) -> SeriesRebase:
        """Return the rebase of a series whose sources are a file of the release to move to."""
        upstream = loaded.upstreams[name]
        assert upstream.source_file is not None
        file = release.upstream.files[upstream.source_file]
        fresh = upstream.model_copy(
            update={"files": {**upstream.files, upstream.source_file: file}, "patched": {}}
        )
        here = replace(self.project.access, mirrors={})
        old = sources.ensure(self.project.store, name, upstream, RELEASE_PLAN, here)
        new = sources.ensure(self.project.store, name, fresh, RELEASE_PLAN, here)
        applied = self._applied(name, loaded, old)
        return SeriesRebase(name, applied.sha256, upstream.model_dump(mode="json"), fresh, old, new)

    def _applied(self, name: str, loaded: pins.Pins, old: sources.Source) -> Series:
        """Return a series that agrees with pins.yaml."""
        patches = self.series_of(name)
        upstream = loaded.upstreams[name]
        if problems := lint.lint(patches, self.project.root, upstream.paths):
            raise SeriesError("\n".join(problems), "fix the series, then rebase it")
        series.apply_recorded(self.project.store, patches, old, upstream)
        return patches

    def check_unchanged(self, *, companions: bool) -> None:
        """Refuse a checkout with changes in files that a rebase writes.

        Raises:
            UsageError: a file there is not committed.
        """
        if not git.git_ok(self.project.root, "rev-parse", "--is-inside-work-tree"):
            return  # not under git: nothing to compare with
        written = ["pins.yaml", "patches", "CHANGELOG.md", "docs/patches.md"]
        written += ["requirements"] if companions else []
        changed = git.git(self.project.root, "status", "--porcelain", "--", *written)
        if changed:
            msg = f"{self.project.root}: uncommitted changes:\n{changed}"
            raise UsageError(msg, "commit or stash them: a rebase replaces these files")

    # -- continuing --------------------------------------------------------------------

    def check_same(self, state: State) -> None:
        """Refuse to continue if the series or its pin has changed since the rebase began.

        Raises:
            UsageError: it has changed.
        """
        loaded = pins.load(self.project.pins_path)
        for part in state.parts:
            if (
                self.series_of(part.upstream).sha256 != part.series
                or loaded.upstream(part.upstream).model_dump(mode="json") != part.pinned
            ):
                msg = f"{part.upstream}: the series or its pin changed after the rebase started"
                raise UsageError(
                    msg, f"undo that change, or run build.py rebase {self.upstream} --abort"
                )

    def run(self, state: State) -> State:
        """Move every patch that is left; RebaseStopped if one needs a person."""
        for part in state.parts:
            rebaser = self._rebaser(part)
            work = self._workspace(part)
            while part.stopped is None and len(part.results) < len(rebaser.series.patches):
                self._move_next(state, part, rebaser, work)
            if part.stopped is not None:
                raise stopped(self.job, part)
        return state

    def _move_next(
        self, state: State, part: SeriesRebase, rebaser: PatchRebaser, work: Workspace
    ) -> None:
        at = len(part.results)
        result = rebaser.rebase(work, at, part.head, part.results)
        if result.stops:
            part.conflict = rebaser.met
            self._lay_out(work)
            part.stopped = result
        else:
            part.results.append(result)
            log.info(f"{result.patch.removesuffix('.patch')}: {result.verdict.value}")
        self.job.save(state)

    def _rebaser(self, part: SeriesRebase) -> PatchRebaser:
        old = self.series_of(part.upstream)
        patched = series.apply(self.project.store, old, part.old)
        kept = old.folder / Memory.FOLDER
        return PatchRebaser(
            self.project.store, old, patched, part.new, kept, self.history, part.target.paths
        )

    def _workspace(self, part: SeriesRebase) -> Workspace:
        """Return a part's workspace at the commit of the state; a stop is left as it is."""
        path = self.job.tree(part)
        if not path.exists():
            if part.stopped is not None:
                msg = f"{path}: is missing, with the resolutions in it"
                raise UsageError(msg, f"start again: build.py rebase {self.upstream} --abort")
            pending = path.with_name(f"{path.name}.new")
            shutil.rmtree(pending, ignore_errors=True)
            Workspace.make(pending, part.new.repo, part.head, None)
            pending.rename(path)
        work = Workspace(path)
        git.tidy(path / ".git")
        if part.stopped is None:
            work.reset(part.head)
        return work

    def _lay_out(self, work: Workspace) -> None:
        """Put the versions of each file in conflict into a folder next to the workspace."""
        shutil.rmtree(self.job.conflict, ignore_errors=True)
        with gitread.reading(work.path) as reader:
            for file in work.unmerged():
                for stage, name in ((1, "base"), (2, "ours"), (3, "theirs")):
                    if stage in file.blobs:
                        target = self.job.conflict / f"{file.path}.{name}"
                        write_file(target, reader.blob(file.blobs[stage]))

    # -- a person's answers --------------------------------------------------------------

    def resolve(self, state: State, part: SeriesRebase) -> None:
        """Take the files of the workspace as the patch's new form.

        Raises:
            UsageError: something is still in conflict, or nothing is left of the patch.
        """
        assert part.stopped is not None
        assert part.conflict is not None
        rebaser, work = self._rebaser(part), self._workspace(part)
        at, head = len(part.results), part.head
        message_of = None
        if work.head != head:
            message_of = work.head  # committed by hand: its message counts
            if (
                git.attempt(work.path, "rev-parse", "--verify", "--quiet", "HEAD^")[1].strip()
                != head
            ):
                msg = (
                    f"{work.path}: is at {work.head[:12]}, not at {head[:12]} or one commit after"
                    " it"
                )
                raise UsageError(msg, f"git -C {work.path} reset --soft {head}")
            work.git("reset", "--soft", head)
        self._check_resolved(work, part.conflict.files)
        work.git("rerere")
        work.git("--literal-pathspecs", "add", "--update", ".")
        tree = work.write_tree()
        if tree == work.git("rev-parse", f"{head}^{{tree}}"):
            msg = f"{part.stopped.patch}: the workspace has no change of it"
            raise UsageError(msg, "drop it: --skip REASON")
        commit = work.commit_like(rebaser.commits[at], tree, head, message_of)
        for name, data in rebaser.memory.learned(work, part.conflict, head, commit).items():
            write_file(self.job.memory / part.upstream / name, data)
        detail = (*part.stopped.detail, "resolved by hand")
        self._answered(
            state, part, replace(part.stopped, stops=False, detail=detail, commit=commit)
        )
        work.reset(commit)

    def _check_resolved(self, work: Workspace, files: tuple[str, ...]) -> None:
        problems = []
        for file in work.unmerged():
            path = work.path / file.path
            sides = {2, 3} <= file.blobs.keys()
            if not sides:
                # such a file has no markers, so nothing shows that a person has looked at it
                problems.append(f"{file.path}: exists on one side only: git add or git rm it")
            elif not path.exists():
                problems.append(f"{file.path}: is deleted: if that is right, git rm it")
        for name in files:
            path = work.path / name
            if path.is_file() and _MARKER.search(path.read_bytes()):
                problems.append(f"{name}: still has conflict markers")
        # if a file conflicts with a link or folder, git keeps one of them under such a name
        added = work.git("diff", "--cached", "--name-only", "--diff-filter=A", "-z", "HEAD")
        problems += [
            f"{name}: git moved it aside for the conflict: git rm --force it"
            for name in added.split("\0")
            if any(name.startswith(f"{path}~") for path in files)
        ]
        untracked = work.git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
        problems += [f"{name}: new: git add it, or remove it" for name in untracked if name]
        if problems:
            msg = f"{work.path}: not resolved:\n  " + "\n  ".join(problems)
            raise UsageError(msg, f"fix these, then build.py rebase {self.upstream} --continue")

    def adopt(self, state: State) -> None:
        """Take the commits that a person made of moved patches, after a trial that failed.

        Raises:
            UsageError: changes are not committed, or the commits do not stand on the new release.
        """
        for part in state.parts if state.tried else ():
            work = Workspace(self.job.tree(part))
            git.tidy(work.path / ".git")
            if changed := work.git("status", "--porcelain"):
                msg = f"{work.path}: uncommitted changes:\n{changed}"
                raise UsageError(msg, "commit them, into the patch that they belong to")
            if work.head == part.head:
                continue
            if not git.git_ok(work.path, "merge-base", "--is-ancestor", part.new.commit, "HEAD"):
                msg = f"{work.path}: HEAD does not stand on {part.new.commit[:12]}, the new release"
                raise UsageError(msg, f"git -C {work.path} reset --hard {part.head}")
            part.amended = work.head
            log.info(f"{part.upstream}: the patches are those of {work.path}, as amended")
        self.job.save(state)

    def skip(self, state: State, part: SeriesRebase, reason: str) -> None:
        """Leave the stopped patch out of the series."""
        assert part.stopped is not None
        work = self._workspace(part)
        self._answered(state, part, replace(part.stopped, stops=False, reason=reason))
        work.reset(part.head)

    def _answered(self, state: State, part: SeriesRebase, result: PatchResult) -> None:
        part.results.append(result)
        part.stopped = part.conflict = None
        self.job.save(state)
        shutil.rmtree(self.job.conflict, ignore_errors=True)


def stopped(job: Job, part: SeriesRebase) -> RebaseStopped:
    """Return the error of a rebase that waits for a person."""
    result = part.stopped
    assert result is not None
    lines = [f"{part.upstream}: {result.patch}: {result.verdict.value}"]
    lines += [f"  {text}" for text in (*result.detail, *result.causes)]
    lines += [f"  in conflict: {job.tree(part) / name}" for name in result.files]
    if job.conflict.is_dir():
        lines.append(f"  the three versions: {job.conflict}/… .base, .ours (new), .theirs (patch)")
    own = job.folder.name
    remedy = f"{result.next}; then build.py rebase {own} --continue, --skip REASON or --abort"
    return RebaseStopped("\n".join(lines), remedy)
