"""One patch after the other onto a new tree, each with its verdict.

The patches are moved as commits: each is merged (``git cherry-pick``, whose base is the commit
before it on the old release) onto the result of the earlier ones on the new one. So renames
are followed, and a conflict has three versions to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from sparkforge.core import git
from sparkforge.maintain.rebase import hints, taken, vanished
from sparkforge.maintain.rebase.diffs import own_lines
from sparkforge.maintain.rebase.history import History
from sparkforge.maintain.rebase.resolutions import Conflict, Memory, conflict
from sparkforge.maintain.rebase.taken import Taken
from sparkforge.maintain.rebase.verdicts import PatchResult, Verdict, compare
from sparkforge.maintain.rebase.workspace import Unmerged, Workspace
from sparkforge.pins.pathmap import PathRule
from sparkforge.series import series
from sparkforge.series.patchfile import Patch
from sparkforge.series.series import Patched, Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store


def _kind(mode: str) -> str:
    return {"120": "a symbolic link", "160": "a submodule"}.get(mode[:3], "a file")


def verdicts(
    store: Store,
    own: Series,
    old: Source,
    new: Source,
    *,
    history: Path | None = None,
    rules: Sequence[PathRule] = (),
) -> list[PatchResult]:
    """Return the result of each patch on another release; changes nothing.

    A patch that stops is left out, and those after it are tried without it
    (``PatchResult.after``).

    Args:
        old: the source that the series applies to, exactly.
        new: a source of the same upstream, from the same store.
        history: a repository with upstream's history, for the commits that renamed or deleted.
        rules: the upstream's ``paths``: which files ship.

    Raises:
        SeriesError: the series does not apply to ``old``.
    """
    patched = series.apply(store, own, old)
    with store.temporary("rebase") as folder:
        rebaser = PatchRebaser(store, own, patched, new, own.folder / Memory.FOLDER, history, rules)
        work = Workspace.make(folder / "tree", new.repo, new.commit, rebaser.paths)
        results: list[PatchResult] = []
        head = new.commit
        for at in range(len(own.patches)):
            result = rebaser.rebase(work, at, head, results)
            if result.stops:
                work.reset(head)
            results.append(result)
            head = result.commit or head
    return results


class PatchRebaser:
    """Moves the patches of a series from the old release, one at a time."""

    def __init__(
        self,
        store: Store,
        own: Series,
        patched: Patched,
        new: Source,
        memory: Path,
        history: Path | None,
        rules: Sequence[PathRule] = (),
    ) -> None:
        self.store = store
        self.series = own
        self.patched = patched
        self.old = patched.source
        self.new = new
        self.memory = Memory(memory)
        self.rules = rules
        self.met: Conflict | None = None
        """The last conflict that was met."""
        self.history = History.of(history, self.old, new)

    @cached_property
    def commits(self) -> list[str]:
        """The patches as commits on the old release, in order."""
        listing = git.git(
            self.old.repo, "rev-list", "--reverse", f"{self.old.commit}..{self.patched.commit}"
        )
        return listing.splitlines()

    @cached_property
    def missing(self) -> dict[str, str | None]:
        """Files of the old release that the series changes and the new one lacks: their new names.

        None where none of the new files is like it.
        """
        touched = {entry.path for patch in self.series.patches for entry in patch.entries}
        before = git.blobs_at(self.old.repo, self.old.commit, touched)
        now = git.blobs_at(self.new.repo, self.new.commit, touched)
        gone = sorted(before.keys() - now.keys())
        renamed = renames(self.new.repo, self.old.commit, self.new.commit, gone)
        return {path: renamed.get(path) for path in gone}

    @cached_property
    def retyped(self) -> dict[str, tuple[str, str]]:
        """Files with another type in the new release: the old and the new type."""
        return {
            change.path: (_kind(change.old_mode), _kind(change.new_mode))
            for change in git.changes(self.new.repo, self.old.commit, self.new.commit)
            if change.status == "T"
        }

    @property
    def paths(self) -> set[str]:
        """The files that moving the series may touch."""
        touched = {entry.path for patch in self.series.patches for entry in patch.entries}
        return touched | {path for path in self.missing.values() if path is not None}

    @cached_property
    def taken(self) -> dict[str, Taken]:
        """The patches with evidence of being in the new release already, by name."""
        place = taken.Looked(
            self.store, self.series, self.commits, self.new, self.paths, self.history
        )
        return taken.taken(place)

    @cached_property
    def vanished(self) -> set[bytes]:
        """Names that the series uses and the new release lacks."""
        words = [self._words(patch, self.diff(at)) for at, patch in enumerate(self.series.patches)]
        return vanished.vanished(set().union(*words), self.rules, self.old, self.new)

    def _words(self, patch: Patch, diff: bytes) -> set[bytes]:
        paths = [
            entry.path if vanished.ships(self.rules, entry.path) else "" for entry in patch.entries
        ]
        return vanished.words(diff, paths)

    def diff(self, at: int) -> bytes:
        """Return a patch's diff on the old release."""
        return git.diff(self.old.repo, f"{self.commits[at]}^", self.commits[at])

    def rebase(
        self, work: Workspace, at: int, head: str, earlier: Iterable[PatchResult]
    ) -> PatchResult:
        """Move one patch onto ``head``; where it stops, the workspace holds the conflict.

        The workspace must stand on ``head``, with no operation in progress. The moved commit exists
        when this returns, and the workspace stands on it.
        """
        patch = self.series.patches[at]
        known = self.taken.get(patch.name)
        if known is not None and known.confirmed:
            return PatchResult(
                patch.name, Verdict.UPSTREAMED, detail=(known.detail,), exact=known.exact
            )
        merged, output = work.pick(self.commits[at])
        remembered = False
        if not merged:
            # before anything is resolved: it is the key of the resolution
            self.met = conflict(work, patch)
            remembered = self.memory.recall(work, self.met, head)
            if not remembered:
                return self._stopped(work, at, output, earlier)
        tree = work.write_tree()
        if tree == work.git("rev-parse", f"{head}^{{tree}}"):
            work.reset(head)
            what = "resolved as before" if remembered else "merged"
            return PatchResult(
                patch.name,
                Verdict.EMPTY,
                remembered=remembered,
                detail=(f"{what}, no change is left",),
            )
        return self.settled(work, at, tree, head, remembered=remembered)

    def settled(
        self, work: Workspace, at: int, tree: str, head: str, *, remembered: bool
    ) -> PatchResult:
        """Commit the moved patch, and compare it with the old one."""
        commit = work.commit_like(self.commits[at], tree, head)
        work.reset(commit)
        before, now = self.diff(at), work.diff(head, commit)
        verdict = compare(before, now)
        patch = self.series.patches[at]
        detail = [*(["resolved as it was before"] if remembered else []), *self._doubts(patch)]
        changed = {change.path for change in git.changes(work.path, head, commit)}
        followed = [
            (path, to)
            for path in (e.path for e in patch.entries)
            if (to := self.missing.get(path)) is not None and to in changed
        ]
        if followed:
            verdict = Verdict.TARGET_RENAMED
            detail += [f"{path} is {to} now: followed" for path, to in followed]
            if own_lines(before) != own_lines(now):
                detail.append("its own lines changed on the way")
        known = {entry.path for entry in patch.entries} | set(self.missing.values())
        detail += [f"{path}: new, where its folder is now" for path in sorted(changed - known)]
        lost = tuple(sorted(word.decode() for word in self._words(patch, now) & self.vanished))
        detail += [f"uses {name}, which the new release no longer has" for name in lost]
        causes = self._causes(path for path, _ in followed)
        files = tuple(path for path, _ in followed)
        return PatchResult(
            patch.name,
            verdict,
            detail=tuple(detail),
            files=files,
            causes=causes,
            remembered=remembered,
            commit=commit,
            vanished=lost,
        )

    def _stopped(
        self, work: Workspace, at: int, output: str, earlier: Iterable[PatchResult]
    ) -> PatchResult:
        patch = self.series.patches[at]
        unmerged = work.unmerged()
        files = tuple(file.path for file in unmerged)
        gone = [e.path for e in patch.entries if e.path in self.missing]
        detail = self._doubts(patch)
        verdict = Verdict.CONFLICT
        if renamed := [path for path in gone if self.missing[path] is not None]:
            verdict = Verdict.TARGET_RENAMED
            detail += [f"{path} is {self.missing[path]} now" for path in renamed]
        # deleted, and the patch does more than delete it
        if deleted := [path for path in gone if self.missing[path] is None and path in files]:
            verdict = Verdict.TARGET_DELETED
            detail += [f"{path} is deleted" for path in deleted]
        for entry in patch.entries:
            if (kinds := self.retyped.get(entry.path)) is not None:
                detail.append(f"{entry.path} is {kinds[1]} now, and was {kinds[0]}")
        shown = [file for file in unmerged if file.path not in deleted]
        detail += hints.for_conflict(patch, self.diff(at), self.missing, self.old, self.new, shown)
        left_out = {result.patch for result in earlier if result.stops or result.reason is not None}
        touched = {entry.path for entry in patch.entries}
        after = tuple(
            p.name
            for p in self.series.patches
            if p.name in left_out and touched & {entry.path for entry in p.entries}
        )
        if not unmerged:  # a kind of conflict that leaves no file with two sides
            detail += [line for line in output.splitlines() if line.startswith("CONFLICT")]
        return PatchResult(
            patch.name,
            verdict,
            stops=True,
            detail=tuple(detail),
            files=files,
            causes=self._causes([*renamed, *deleted], shown),
            after=after,
        )

    def _doubts(self, patch: Patch) -> list[str]:
        """Return the disproved evidence for a patch being in the new release."""
        known = self.taken.get(patch.name)
        return [known.detail] if known is not None and not known.confirmed else []

    def _causes(self, gone: Iterable[str], changed: Iterable[Unmerged] = ()) -> tuple[str, ...]:
        """Return upstream's commits that renamed or deleted files, or changed others last."""
        if self.history is None:
            return ()
        causes = [self.history.cause(path) for path in gone]
        causes += [text for file in changed for text in self.history.touching(file.path)]
        return tuple(dict.fromkeys(text for text in causes if text is not None))


def renames(repo: Path, old: str, new: str, gone: list[str]) -> dict[str, str]:
    """Return the new name of each of these files of ``old`` that ``new`` has under another.

    Only they are compared with new files, so that the number of moves in a release does not
    matter.
    """
    if not gone:
        return {}
    kinds = {Path(path).suffix for path in gone}
    added = [
        change.path
        for change in git.changes(repo, old, new)
        if change.status == "A" and Path(change.path).suffix in kinds
    ]
    if not added:
        return {}
    diff = ("--literal-pathspecs", "diff-tree", "-r", "-z", "--find-renames", "-l0")
    shown = ("--diff-filter=R", "--name-status", old, new, "--")
    raw = git.git(repo, *diff, *shown, *gone, *added)
    fields = raw.split("\0")
    return {
        before: after
        for _, before, after in zip(fields[0::3], fields[1::3], fields[2::3], strict=False)
    }
