"""One series onto another release: git rebases it, and each patch gets its verdict."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import UsageError
from sparkforge.maintain.rebase import conflicts, lookover, memory
from sparkforge.maintain.rebase.tree import Tree, Unmerged
from sparkforge.maintain.rebase.verdicts import PatchResult, Verdict, compare
from sparkforge.pins.types import PathRule
from sparkforge.series import series
from sparkforge.series.patchfile import Patch
from sparkforge.series.series import Patched, Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store


@dataclass(frozen=True)
class Stop:
    """A patch that stopped a rebase."""

    result: PatchResult
    files: tuple[str, ...]
    """In conflict."""
    head: str
    """The commit that it was to be merged into."""
    others: str
    """Digest of the files that are not in conflict."""
    lines: dict[str, str]
    """rerere's names of the conflicts, and their paths."""


@dataclass
class Progress:
    """What happened to patches on their way, by name."""

    stops: dict[str, Stop] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    """The commits that a person made of patches that stopped."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a person left patches out."""
    remembered: list[str] = field(default_factory=list)
    """Patches whose conflicts were resolved as before."""


@dataclass(frozen=True)
class Mover:
    """A series, the release that it is made for, and the one that it moves to."""

    series: Series
    patched: Patched
    """The series on the old release."""
    new: Source
    rules: Sequence[PathRule] = ()
    """The upstream's ``paths``: which files ship."""
    history: Path | None = None
    """A repository with upstream's history."""
    ruff: str | None = None

    @classmethod
    def of(
        cls,
        store: Store,
        own: Series,
        old: Source,
        new: Source,
        rules: Sequence[PathRule] = (),
        history: Path | None = None,
    ) -> Mover:
        """Return one; raises SeriesError if the series does not apply to ``old``."""
        # the checkout's own environment of tests has ruff
        path = os.pathsep.join(
            [str(own.folder.parents[1] / ".venv-dev" / "bin"), os.environ.get("PATH", "")]
        )
        ruff = shutil.which("ruff", path=path)
        return cls(own, series.apply(store, own, old), new, rules, history, ruff)

    @property
    def old(self) -> str:
        return self.patched.source.commit

    @cached_property
    def commits(self) -> dict[str, Patch]:
        """The patches by their commits on the old release, in order."""
        words = ("rev-list", "--reverse", f"{self.old}..{self.patched.commit}")
        listing = git.git(self.patched.source.repo, *words).splitlines()
        return dict(zip(listing, self.series.patches, strict=True))

    def start(self, tree: Tree) -> None:
        """Begin, up to the first conflict."""
        names = {commit: patch.name for commit, patch in self.commits.items()}
        tree.start(self.old, names, self.new.commit)

    def advance(
        self, tree: Tree, progress: Progress, *, provisionally: bool = False
    ) -> Stop | None:
        """Go on to the next patch that needs a person; None: all have moved.

        Args:
            provisionally: resolve it by a guess instead, and go on.
        """
        while (commit := tree.stopped) is not None:
            name = self.commits[commit].name
            if name in progress.reasons:
                tree.rebase("--skip")
                continue
            if (answer := progress.answers.get(name)) is not None:
                tree.git("read-tree", "--reset", "-u", f"{answer}^{{tree}}")
                tree.proceed(answer)
                continue
            if self._taken(tree):
                tree.rebase("--skip")
                continue
            stop = self._stop(tree, self.commits[commit])
            if memory.recall(self.series.folder / memory.FOLDER, tree):
                progress.remembered.append(name)
            else:
                progress.stops[name] = stop
                if not provisionally:
                    return stop
                conflicts.resolve_provisionally(tree)
            tree.proceed(commit)
        return None

    def _taken(self, tree: Tree) -> bool:
        """Return whether the new release has all that the series does to the files in conflict.

        So a patch may conflict with what a later one makes of its lines.
        """
        files = tree.unmerged()
        changed = tree.git("diff", "--cached", "--name-only", "-z", "HEAD").split("\0")
        if not files or {*changed} - {"", *(file.path for file in files)}:
            return False
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                now = tree.blob(file.blobs.get(2))
                for name, commit in (("base", self.old), ("ours", self.patched.commit)):
                    code, text = git.attempt(tree.path, "cat-file", "blob", f"{commit}:{file.path}")
                    if code:
                        return False
                    (Path(folder) / name).write_bytes(text.encode(errors="surrogateescape"))
                (Path(folder) / "now").write_bytes(now)
                words = ("merge-file", "-p", "--quiet")
                code, merged = git.attempt(Path(folder), *words, "now", "base", "ours")
                if code or merged.encode(errors="surrogateescape") != now:
                    return False
        return True

    def _stop(self, tree: Tree, patch: Patch) -> Stop:
        unmerged = tree.unmerged()
        files = tuple(file.path for file in unmerged)
        paths = {entry.path for entry in patch.entries}
        gone = sorted(paths - git.blobs_at(tree.path, "HEAD", paths).keys() - _added(patch))
        # git's own words about everything but two versions of a text
        lines = [line for line in tree.output.splitlines() if line.startswith("CONFLICT (")]
        detail = [
            line for line in lines if not line.startswith(("CONFLICT (content)", "CONFLICT (add"))
        ]
        verdict = Verdict.CONFLICT
        if renamed := sorted({*files} - paths):
            if gone:
                verdict = Verdict.TARGET_RENAMED
                detail.insert(0, f"{', '.join(gone)} is {', '.join(renamed)} now")
        elif deleted := [path for path in gone if path in files]:
            verdict = Verdict.TARGET_DELETED
            detail.insert(0, f"{', '.join(deleted)} is deleted")
        detail += conflicts.hints(tree, self.old, self.new.commit, unmerged)
        result = PatchResult(
            patch.name,
            verdict,
            stops=True,
            detail=tuple(detail),
            causes=self._causes([*files, *gone]),
        )
        return Stop(result, files, tree.head, _others(tree, unmerged), memory.conflicts(tree))

    def _causes(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Return upstream's last commits that touched some files, ``SHA subject``."""
        span = f"{self.old}..{self.new.commit}"
        if self.history is None or not paths:
            return ()
        words = ("log", "-3", "--no-merges", "--full-history", "--format=%h %s", span, "--", *paths)
        code, listing = git.attempt(self.history, *words)
        return tuple(listing.splitlines()) if code == 0 else ()  # a release has no history

    # -- verdicts ------------------------------------------------------------------------------

    def results(self, tree: Tree, progress: Progress) -> list[PatchResult]:
        """Return the result of each patch up to the one at which the tree is stopped."""
        stopped = tree.stopped
        names = [patch.name for patch in self.series.patches]
        olds = list(self.commits)
        if stopped is not None:
            olds = olds[: olds.index(stopped)]
        left = tree.moved(self.new.commit)
        moved = {
            old: left[name]
            for old, name in zip(olds, names, strict=False)
            if name in left and name not in progress.reasons
        }
        used = {commit: self._words(tree, commit) for commit in moved.values()}
        lost = lookover.vanished(
            tree, set().union(*used.values()), self.rules, self.old, self.new.commit
        )
        guessed = {
            name
            for name in progress.stops
            if name not in progress.answers and name not in progress.reasons
        }
        checked = [
            (old, new) for old, new in moved.items() if self.commits[old].name not in guessed
        ]
        broken = lookover.broken(tree, self.ruff, checked)
        results = []
        for old, name in zip(olds, names, strict=False):
            stop = progress.stops.get(name)
            if name in guessed and stop is not None:
                results.append(stop.result)
            elif old not in moved:
                results.append(_dropped(name, stop, progress.reasons.get(name)))
            else:
                new = moved[old]
                result = self._moved(tree, old, new, stop)
                names_lost = tuple(sorted(word.decode() for word in used[new] & lost))
                found = [f"uses {one}, which the new release no longer has" for one in names_lost]
                found += broken.get(new, ())
                remembered = name in progress.remembered
                if remembered:
                    found.insert(0, "resolved as it was before")
                results.append(
                    replace(
                        result,
                        detail=(*result.detail, *found),
                        vanished=names_lost,
                        remembered=remembered,
                    )
                )
        if stopped is not None:
            results.append(progress.stops[self.commits[stopped].name].result)
        return results

    def _words(self, tree: Tree, commit: str) -> set[bytes]:
        files = [change.path for change in git.changes(tree.path, f"{commit}^", commit)]
        shipped = [path for path in files if lookover.ships(self.rules, path)]
        words = ("--literal-pathspecs", "diff-tree", "-p", "--no-renames", f"{commit}^", commit)
        diff = git.git_bytes(tree.path, *words, "--", *shipped) if shipped else b""
        return lookover.words(diff)

    def _moved(self, tree: Tree, old: str, commit: str, stop: Stop | None) -> PatchResult:
        """Return the result of a patch that has moved."""
        patch = self.commits[old]
        if stop is not None:
            by_hand = (*stop.result.detail, "resolved by hand")
            return replace(stop.result, stops=False, detail=by_hand, commit=commit)
        detail: tuple[str, ...] = ()
        verdict = compare(tree, old, commit)
        changed = {change.path for change in git.changes(tree.path, f"{commit}^", commit)}
        paths = {entry.path for entry in patch.entries}
        gone, fresh = sorted(paths - changed), sorted(changed - paths)
        if gone and fresh:
            verdict = Verdict.TARGET_RENAMED
            detail = (f"{', '.join(gone)} is {', '.join(fresh)} now: followed",)
        causes = self._causes(gone) if fresh else ()
        return PatchResult(patch.name, verdict, detail=detail, causes=causes, commit=commit)


def _dropped(name: str, stop: Stop | None, reason: str | None) -> PatchResult:
    if reason is not None and stop is not None:
        return replace(stop.result, stops=False, reason=reason)
    return PatchResult(
        name, Verdict.UPSTREAMED, detail=("the new release has it: merging leaves no change",)
    )


def _added(patch: Patch) -> set[str]:
    return {entry.path for entry in patch.entries if entry.added}


def _others(tree: Tree, unmerged: Sequence[Unmerged], commit: str | None = None) -> str:
    """Return a digest of the files that are not in conflict, in the index or in a commit."""
    paths = {file.path for file in unmerged}
    words = ("ls-files", "-s", "-z") if commit is None else ("ls-tree", "-r", "-z", commit)
    at = 1 if commit is None else 2  # MODE BLOB STAGE, or MODE KIND BLOB
    listing = (line.split("\t", 1) for line in tree.git(*words).split("\0") if line)
    blobs = sorted(f"{path} {meta.split(' ')[at]}" for meta, path in listing if path not in paths)
    return hashlib.sha256("\n".join(blobs).encode(errors="surrogateescape")).hexdigest()


def resolved(tree: Tree, stop: Stop) -> tuple[str, dict[str, bytes]]:
    """Commit what a person made of a patch that stopped; returns the commit, and what to remember.

    Raises:
        UsageError: something is still in conflict, or nothing is left of the patch.
    """
    picked = tree.stopped
    assert picked is not None
    if tree.head != stop.head:  # committed by hand: its message counts
        picked = tree.head
        code, parent = git.attempt(tree.path, "rev-parse", "--verify", "--quiet", "HEAD^")
        if code or parent.strip() != stop.head:
            msg = f"{tree.path}: is not at {stop.head[:12]} or one commit after it"
            raise UsageError(msg, f"git -C {tree.path} reset --soft {stop.head}")
        tree.git("reset", "--quiet", "--soft", stop.head)
    _check_resolved(tree, stop)
    tree.git("rerere")
    tree.git("--literal-pathspecs", "add", "--update", ".")
    if tree.git("write-tree") == tree.git("rev-parse", "HEAD^{tree}"):
        msg = f"{stop.result.patch}: the work tree has no change of it"
        raise UsageError(msg, "drop it: --skip REASON")
    tree.commit(picked)
    unmerged = [Unmerged(path, {}) for path in stop.files]
    # where a person changed more than the files in conflict, their lines alone must not resolve
    # it elsewhere: the rest of the answer would silently be missing
    known = len(stop.lines) == len(stop.files) and _others(tree, unmerged, "HEAD") == stop.others
    return tree.head, memory.learned(tree, stop.lines) if known else {}


def _check_resolved(tree: Tree, stop: Stop) -> None:
    problems = []
    for file in tree.unmerged():
        if not {2, 3} <= file.blobs.keys():
            # such a file has no markers, so nothing shows that a person has looked at it
            problems.append(f"{file.path}: exists on one side only: git add or git rm it")
        elif not (tree.path / file.path).exists():
            problems.append(f"{file.path}: is deleted: if that is right, git rm it")
    for name in stop.files:
        path = tree.path / name
        if path.is_file() and conflicts.MARKER.search(path.read_bytes()):
            problems.append(f"{name}: still has conflict markers")
    # if a file conflicts with a link or folder, git keeps one of them under such a name
    added = tree.git("diff", "--cached", "--name-only", "--diff-filter=A", "-z", "HEAD").split("\0")
    problems += [
        f"{name}: git moved it aside for the conflict: git rm --force it"
        for name in added
        if any(name.startswith(f"{path.partition('~')[0]}~") for path in stop.files)
    ]
    untracked = tree.git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    problems += [f"{name}: new: git add it, or remove it" for name in untracked if name]
    if problems:
        msg = f"{tree.path}: not resolved:\n  " + "\n  ".join(problems)
        raise UsageError(msg, "fix these, then --continue")


def dry_run(store: Store, mover: Mover) -> list[PatchResult]:
    """Return the result of each patch on another release; changes nothing.

    A patch that stops is resolved by a guess, so that those after it can be tried.
    """
    progress = Progress()
    with store.temporary("rebase") as folder:
        tree = Tree.make(folder / "tree", mover.new.repo)
        mover.start(tree)
        mover.advance(tree, progress, provisionally=True)
        return mover.results(tree, progress)
