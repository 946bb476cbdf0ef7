"""One series onto another release: git rebases it, and each patch gets its verdict.

The work tree borrows the store's objects (``alternates``); its state is that of ``git rebase``.
"""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, UsageError
from sparkforge.maintain import findings
from sparkforge.maintain.findings import MARKER, PatchResult, Unmerged, Verdict
from sparkforge.maintain.releases import Release
from sparkforge.pins.types import PathRule
from sparkforge.series import series
from sparkforge.series.patchfile import Patch
from sparkforge.series.series import Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

_CONFIG = {
    "rerere.enabled": "true",
    "rerere.autoUpdate": "true",
    "merge.conflictStyle": "diff3",  # a conflict shows the common base
    "merge.directoryRenames": "true",  # a new file goes where its folder went
    "core.autocrlf": "false",
    "gc.auto": "0",
    "notes.rewriteRef": "refs/notes/patches",  # a commit's patch, through rebases and amends
    "user.name": git.COMMITTER,
    "user.email": git.COMMITTER_EMAIL,
}
_PICK = ("--quiet", "--empty=drop", "--reapply-cherry-picks", "--no-autosquash", "--no-verify")
_SAME = re.compile(r"1: +[0-9a-f]+ = 1: ")
_OWN = re.compile(r"^    [+-][+-]", re.MULTILINE)


@dataclass
class Progress:
    """What happened to patches on their way, by name."""

    stops: dict[str, PatchResult] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a person left patches out."""
    remembered: list[str] = field(default_factory=list)


class Mover:
    """A series on its way from one release to another, in a work tree."""

    def __init__(
        self,
        store: Store,
        own: Series,
        ends: tuple[Source, Source],
        places: tuple[Path, Path],
        rules: Sequence[PathRule],
        progress: Progress,
    ) -> None:
        """Apply the series to the old release, and make the work tree if it is missing.

        Args:
            ends: the old and the new release.
            places: of the work tree, and of git's rerere cache, unused where it is missing.
            rules: the upstream's ``paths``: which files ship.
            progress: of an earlier run.
        """
        old, new = ends
        folder, memory = places
        tip = series.apply(store, own, old).commit
        commits = git.git(old.repo, "rev-list", "--reverse", f"{old.commit}..{tip}").splitlines()
        self.patches: dict[str, Patch] = dict(zip(commits, own.patches, strict=True))
        self.old, self.new, self.tip = old.commit, new.commit, tip
        self.folder, self.rules, self.progress = folder, rules, progress
        self.output = ""  # of the last `git rebase`
        # the checkout's own environment of tests has ruff
        path = f"{own.folder.parents[1] / '.venv-dev' / 'bin'}:{os.environ.get('PATH', '')}"
        self.ruff = shutil.which("ruff", path=path)
        if folder.exists():
            git.tidy(folder / ".git")  # a killed git
            return
        fresh = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        git.git(fresh, "init", "--quiet", "--template=", "--initial-branch=main", ".")
        (fresh / ".git/objects/info").mkdir(parents=True, exist_ok=True)
        alternates = fresh / ".git/objects/info/alternates"
        alternates.write_text(f"{new.repo.resolve() / 'objects'}\n")
        if (new.repo / "shallow").exists():  # the store fetches commits without their history
            shutil.copyfile(new.repo / "shallow", fresh / ".git/shallow")
        if memory.is_dir():
            (fresh / ".git/rr-cache").symlink_to(memory.resolve())
        for key, value in _CONFIG.items():
            git.git(fresh, "config", key, value)
        fresh.rename(folder)

    def git(self, *words: str) -> str:
        """Run git in the work tree, isolated from the user's settings."""
        return git.git(self.folder, *words)

    @property
    def stopped(self) -> str | None:
        """The commit at which git stopped; None: no rebase is in progress."""
        if not (self.folder / ".git/rebase-merge").is_dir():
            return None
        return self.git("rev-parse", "--verify", "REBASE_HEAD")

    @property
    def _committed(self) -> bool:
        """Whether the patch at which git stopped is committed."""
        return self.git("log", "-1", "--walk-reflogs", "--format=%gs").startswith("commit")

    # -- moving --------------------------------------------------------------------------------

    def start(self) -> None:
        """Rebase from the beginning up to the first conflict; what is in progress is forgotten."""
        for commit, patch in self.patches.items():
            self.git("notes", "--ref=patches", "add", "--force", "--message", patch.name, commit)
        shutil.rmtree(self.folder / ".git/rebase-merge", ignore_errors=True)
        self.git("checkout", "--quiet", "--force", "--detach", self.tip)
        self.git("clean", "-ffdxq")
        self.progress.remembered.clear()
        self._rebase(*_PICK, "--onto", self.new, self.old)

    def _rebase(self, *words: str) -> None:
        """Run ``git rebase`` up to its end or the next conflict."""
        before = self.stopped
        how = ("-c", "core.editor=true", "rebase", *words)
        code, self.output = git.attempt(self.folder, *how)
        if code and self.stopped in (None, before):
            raise CommandError(f"git rebase {' '.join(words)} in {self.folder}:\n{self.output}")

    def advance(self, *, guess: bool = False) -> PatchResult | None:
        """Go on to the next patch that needs a person; None: all have moved.

        Args:
            guess: resolve it provisionally instead, so that those after it can be tried.
        """
        progress = self.progress
        while (commit := self.stopped) is not None:
            name, unmerged = self.patches[commit].name, self._unmerged()
            if name in progress.reasons:
                self._rebase("--skip")
            elif self._committed:
                self._rebase("--continue")
            elif not unmerged:  # by rerere
                progress.remembered.append(name)
                self._proceed(commit)
            else:
                progress.stops[name] = stop = self._stop(self.patches[commit], unmerged)
                if not guess:
                    return stop
                findings.resolve_provisionally(self.folder, unmerged)
                self.git("add", "--all")
                self.git("rerere", "clear")  # a guess is nothing to remember
                self._proceed(commit)
        return None

    def _proceed(self, message_of: str) -> None:
        """Commit the resolved files with the message of a commit, and go on."""
        self._rebase("--continue" if self._commit(message_of) else "--skip")

    def _commit(self, message_of: str) -> bool:
        """Commit the index; returns whether there was a change."""
        if self.git("write-tree") == self.git("rev-parse", "HEAD^{tree}"):
            return False
        self.git("commit", "--quiet", "--no-verify", "--cleanup=verbatim", "-C", message_of)
        return True

    def answer(self, name: str) -> None:
        """Take what a person made of the patch that stopped: its files, or a commit of them."""
        commit, by_hand = self.stopped, self._committed
        if commit is None or self.patches[commit].name != name:
            return  # git itself went on
        problems = self._problems(self.progress.stops[name])
        if by_hand and (changed := self.git("status", "--porcelain", "--untracked-files=no")):
            problems.append(f"uncommitted changes: {changed}")
        if problems:
            msg = f"{self.folder}: not resolved:\n  " + "\n  ".join(problems)
            raise UsageError(msg, "fix these, then --continue")
        if not by_hand:
            self.git("--literal-pathspecs", "add", "--update", ".")
            if not self._commit(commit):
                msg = f"{name}: the work tree has no change of it"
                raise UsageError(msg, "drop it: --skip REASON")

    def _problems(self, stop: PatchResult) -> list[str]:
        problems = [
            f"{path}: exists on one side only: git add or git rm it"
            for path, blobs in self._unmerged().items()
            # such a file has no markers, so nothing shows that a person has looked at it
            if not {2, 3} <= blobs.keys() or not (self.folder / path).exists()
        ]
        for name in stop.files:
            path = self.folder / name
            if path.is_file() and MARKER.search(path.read_bytes()):
                problems.append(f"{name}: still has conflict markers")
        new = self.git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
        return problems + [f"{name}: new: git add it, or remove it" for name in new if name]

    def _unmerged(self) -> Unmerged:
        files: dict[str, dict[int, str]] = {}
        for line in filter(None, self.git("ls-files", "-u", "-z").split("\0")):
            meta, path = line.split("\t", 1)
            _, blob, stage = meta.split(" ")
            files.setdefault(path, {})[int(stage)] = blob
        return files

    # -- verdicts ------------------------------------------------------------------------------

    def _stop(self, patch: Patch, unmerged: Unmerged) -> PatchResult:
        files = tuple(unmerged)
        paths = {entry.path for entry in patch.entries}
        fresh = {entry.path for entry in patch.entries if entry.added}
        gone = sorted(paths - git.blobs_at(self.folder, "HEAD", paths).keys() - fresh)
        # git's own words about everything but two versions of a text
        lines = [line for line in self.output.splitlines() if line.startswith("CONFLICT (")]
        told = ("CONFLICT (content)", "CONFLICT (add")
        detail = [line for line in lines if not line.startswith(told)]
        verdict = Verdict.CONFLICT
        if renamed := sorted({*files} - paths):
            if gone:
                verdict = Verdict.TARGET_RENAMED
                detail.insert(0, f"{', '.join(gone)} is {', '.join(renamed)} now")
        elif deleted := [path for path in gone if path in files]:
            verdict = Verdict.TARGET_DELETED
            detail.insert(0, f"{', '.join(deleted)} is deleted")
        detail += findings.hints(self.folder, unmerged)
        return PatchResult(patch.name, verdict, True, tuple(detail), files)

    def results(self) -> list[PatchResult]:
        """Return the result of each patch; all have moved."""
        log = ("log", "--notes=patches", "--format=%H%x00%N%x01", f"{self.new}..HEAD")
        entries = (entry.strip().split("\0") for entry in self.git(*log).split("\x01"))
        # a commit that is dropped leaves its name at the one before it, behind that one's own
        left = {entry[1].split()[0]: entry[0] for entry in entries if entry[1:] and entry[1]}
        progress = self.progress
        moved = {old: left[one.name] for old, one in self.patches.items() if one.name in left}
        found = findings.of_merged(
            self.folder, self.ruff, self.rules, (self.old, self.new), list(moved.items())
        )
        results = []
        for old, patch in self.patches.items():
            name = patch.name
            stop, reason = progress.stops.get(name), progress.reasons.get(name)
            if old not in moved and stop is not None:
                told = (*stop.detail, f"left out: {reason or 'by git rebase --skip'}")
                result = replace(stop, stops=False, detail=told, answer="dropped by hand")
            elif old not in moved:
                why = "the new release has it: merging leaves no change"
                result = PatchResult(name, Verdict.UPSTREAMED, detail=(why,))
            else:
                result = self._moved(old, moved[old], patch)
                if stop is not None:
                    result = replace(stop, stops=False, answer="resolved by hand")
                detail = (*result.detail, *found[moved[old]])
                result = replace(result, commit=moved[old], detail=detail)
            results.append(result)
        return results

    def _moved(self, old: str, commit: str, patch: Patch) -> PatchResult:
        """Return the result of a patch that merged by itself."""
        answer = "remembered" if patch.name in self.progress.remembered else ""
        changed = {change.path for change in git.changes(self.folder, f"{commit}^", commit)}
        paths = {entry.path for entry in patch.entries}
        gone, fresh = sorted(paths - changed), sorted(changed - paths)
        if gone and fresh:
            detail = (f"{', '.join(gone)} is {', '.join(fresh)} now: followed",)
            return PatchResult(patch.name, Verdict.TARGET_RENAMED, detail=detail, answer=answer)
        # they are a pair, however much one shrank
        how = ("--no-color", "--no-dual-color", "--creation-factor=999")
        told = self.git("range-diff", *how, f"{old}^!", f"{commit}^!")
        head, _, body = told.partition("\n")
        verdict = Verdict.CHANGED if _OWN.search(body) else Verdict.CONTEXT_ONLY
        verdict = Verdict.CLEAN if _SAME.match(head) else verdict
        return PatchResult(patch.name, verdict, answer=answer)


def dry_run(
    store: Store, own: Series, release: Release, rules: Sequence[PathRule], memory: Path
) -> list[PatchResult]:
    """Return the result of each patch on another release, conflicts resolved by a guess."""
    with store.temporary("rebase") as work:
        ends, places = (release.old, release.source), (work / "tree", memory)
        mover = Mover(store, own, ends, places, rules, Progress())
        mover.start()
        mover.advance(guess=True)
        return [mover.progress.stops.get(one.patch, one) for one in mover.results()]
