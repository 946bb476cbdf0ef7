"""The patches that a new release has already, and the evidence.

That a patch can be reverted in the new tree (``git apply`` finds its lines at any offset), or
that a commit of upstream's has its patch-id (which knows no line numbers), is evidence: the same
lines may have been changed at another place, or the change may have been reverted since. So
evidence is confirmed at its exact place: a merge of three versions must leave nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git, gitread
from sparkforge.core.gitread import Reader
from sparkforge.maintain.rebase import diffs
from sparkforge.maintain.rebase.history import History, Made
from sparkforge.maintain.rebase.workspace import Workspace
from sparkforge.series.series import Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store


@dataclass(frozen=True)
class Taken:
    """Evidence for a patch being in the new release."""

    confirmed: bool
    """It is there, at its place; else ``detail`` names the difference."""
    detail: str
    exact: bool = True
    """Nothing of it was changed since."""


@dataclass(frozen=True)
class Looked:
    """The search for a series: its commits on the old release, and the new release."""

    store: Store
    series: Series
    commits: Sequence[str]
    """The patches as commits on the old release, in order."""
    new: Source
    paths: Iterable[str]
    history: History | None
    """Upstream's commits between the releases, if available."""


def taken(place: Looked) -> dict[str, Taken]:
    """Return the evidence of each patch that has any, by file name."""
    if not place.series.patches:
        return {}
    known: dict[str, Taken] = {}
    with place.store.temporary("taken") as folder:
        work = Workspace.make(folder / "tree", place.new.repo, place.new.commit, place.paths)
        if place.history is not None:
            work.borrow(place.history.repo)
        tip = place.new.commit
        # last first, each reverted in turn: a later patch may need an earlier one
        for patch, commit in reversed(list(zip(place.series.patches, place.commits, strict=True))):
            evidence, tip = _look(place, work, tip, patch.path, commit)
            if evidence is not None:
                known[patch.name] = evidence
    return known


def _look(
    place: Looked, work: Workspace, tip: str, patch: Path, commit: str
) -> tuple[Taken | None, str]:
    """Look for one patch in a commit; returns that commit without it, where it is there."""
    made = _made(place.history, work, commit)
    env = {"GIT_INDEX_FILE": str(work.path / ".git" / "reversed")}
    work.git("read-tree", tip, env=env)
    reverse = ("apply", "--cached", "--reverse", "--whitespace=nowarn", str(patch.resolve()))
    code, _ = git.attempt(work.path, *reverse, env=env)
    if code != 0 and made is None:
        return None, tip
    left = work.merged(tip, commit)
    if left == work.tree_of(tip):
        if code == 0:
            how = "the new release contains all of it; merging leaves no change"
        else:
            assert made is not None
            how = f"upstream's commit {made.commit} makes the same change; merging leaves no change"
        without = work.merged(tip, commit, revert=True)
        # a commit made here, for the next to be looked for in
        return Taken(True, how), tip if without is None else work.commit_like(commit, without, tip)
    if made is None:
        what = "the new release has the same change at another place, but not here"
        return (Taken(False, what) if left is not None else None), tip
    return _unless_undone(work, tip, commit, made, left), tip


def _made(history: History | None, work: Workspace, commit: str) -> Made | None:
    """Return upstream's handling of the change of a commit."""
    if history is None:
        return None
    forth, back = work.diff(f"{commit}^", commit), work.diff(commit, f"{commit}^")
    return history.made(git.patch_id(forth), git.patch_id(back))


def _unless_undone(
    work: Workspace, tip: str, commit: str, made: Made, left: str | None
) -> Taken | None:
    """Judge a change of upstream's that has changed since: extended, or reverted?"""
    made_by = f"upstream's commit {made.commit} makes the same change"
    if made.undone is not None:
        return Taken(False, f"{made_by}, and {made.undone} reverts it")
    if left is not None:
        return Taken(False, f"{made_by}, but it is no longer there")
    if work.merged(made.commit, commit) != work.tree_of(made.commit):
        return Taken(False, f"{made_by}, but at another place")
    if not _evolved(work, tip, commit, made.commit):
        return Taken(False, f"{made_by}, but little of it is left: changed again, or reverted?")
    return Taken(True, f"{made_by}; it was changed again later", exact=False)


def _evolved(work: Workspace, tip: str, commit: str, made: str) -> bool:
    """Return whether most lines that a change added are there, and none that it removed."""
    added = back = there = 0
    changes = git.changes(work.path, f"{commit}^", commit)
    with gitread.reading(work.path) as reader:
        lines_of = {
            change.path: [_lines(reader, at, change.path) for at in (tip, made)]
            for change in changes
        }
    for path, (now, then) in lines_of.items():
        words = ("diff-tree", "-p", "--full-index", "--no-renames", f"{commit}^", commit)
        diff = git.git_bytes(work.path, *words, "--", path)
        for hunk in (hunk for part in diffs.hunks(diff) for hunk in part):
            lines = diffs.plain(hunk.added)
            added += len(lines)
            there += sum(line in now for line in lines)
            removed = diffs.plain(hunk.removed)
            back += sum(line in now and line not in then for line in removed)
    return back == 0 and added > 0 and 2 * there >= added


def _lines(reader: Reader, commit: str, path: str) -> set[bytes]:
    return set(diffs.plain((reader.content(commit, path) or b"").splitlines()))
