"""One series onto another release: git rebases it, and each patch gets its verdict.

The work tree borrows the store's objects (``alternates``); its state is that of ``git rebase``. Git
merges text: a patch whose own lines call a function merges silently into a tree in which that
function has another name. So names and Python are looked at, too.
"""

import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sparkforge.core import git
from sparkforge.core.errors import CommandError, UsageError
from sparkforge.core.run import call
from sparkforge.maintain.releases import Move, PatchResult, Verdict
from sparkforge.series import series
from sparkforge.series.patchfile import Patch
from sparkforge.sources.project import Project

CONFIG = Path(__file__).with_name("gitconfig")
"""Settings of git in the work trees and clones of this package."""
_PICK = ("--quiet", "--empty=drop", "--reapply-cherry-picks", "--no-autosquash", "--no-verify")
_WORKING = ".git/sparkforge-working"
"""There while git works: left by a kill."""
_DROPPED = "dropped by hand"
_SAME = re.compile(r"1: +[0-9a-f]+ = 1: ")
_OWN = re.compile(r"^    [+-][+-]", re.MULTILINE)


def stopped_in(folder: Path) -> str | None:
    """Return the patch at which git stopped in a work tree; None: no rebase waits there."""
    if (folder / _WORKING).exists() or not (folder / ".git/rebase-merge").is_dir():
        return None
    return git.git(folder, "notes", "--ref=patches", "show", "REBASE_HEAD")


class Mover:
    """A series on its way from one release to another, in a work tree."""

    def __init__(self, project: Project, move: Move, folder: Path) -> None:
        """Apply the series to the old release."""
        self.project, self.move, self.folder = project, move, folder
        # git's rerere cache, which outlives the rebase
        self.memory = project.root / "dist" / "rebase" / "rerere" / move.upstream
        old, own = move.old, series.read(project.series_folder(move.upstream))
        self.tip = series.apply(project.store, own, old).commit
        commits = git.git(old.repo, "rev-list", "--reverse", f"{old.commit}..{self.tip}")
        self.patches: dict[str, Patch] = dict(zip(commits.split(), own.patches, strict=True))
        git.tidy(folder / ".git")  # a killed git

    def git(self, *words: str) -> str:
        """Run git in the work tree, isolated from the user's settings."""
        return git.git(self.folder, *words)

    @property
    def started(self) -> bool:
        """Whether git has moved the series up to a stop that is known, or to the end."""
        name = stopped_in(self.folder)
        if (self.folder / _WORKING).exists() or (name is not None and name not in self.move.stops):
            return False
        below = ("merge-base", "--is-ancestor", self.move.new.commit, "HEAD")
        return git.attempt(self.folder, *below)[0] == 0

    @property
    def _committed(self) -> bool:
        """Whether the patch at which git stopped is committed."""
        return self.git("log", "-1", "--walk-reflogs", "--format=%gs").startswith("commit")

    # -- moving --------------------------------------------------------------------------------

    def start(self) -> None:
        """Rebase in a new work tree up to the first conflict; the old one is removed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.git("init", "--quiet", "--template=", "--initial-branch=main", ".")
        alternates = self.folder / ".git/objects/info/alternates"
        alternates.parent.mkdir(exist_ok=True)
        alternates.write_text(f"{self.move.new.repo.resolve() / 'objects'}\n")
        if self.memory.is_dir():
            (self.folder / ".git/rr-cache").symlink_to(self.memory.resolve())
        self.git("config", "include.path", str(CONFIG))
        for commit, patch in self.patches.items():
            self.git("notes", "--ref=patches", "add", "--message", patch.name, commit)
        self.git("checkout", "--quiet", "--detach", self.tip)
        self._rebase(*_PICK, "--onto", self.move.new.commit, self.move.old.commit)

    def _rebase(self, *words: str) -> None:
        """Run ``git rebase`` up to its end or the next conflict."""
        before, working = stopped_in(self.folder), self.folder / _WORKING
        working.touch()
        code, output = git.attempt(self.folder, "-c", "core.editor=true", "rebase", *words)
        working.unlink()
        if code and stopped_in(self.folder) in (None, before):
            raise CommandError(f"git rebase {' '.join(words)} in {self.folder}:\n{output}")

    def advance(self, *, guess: bool = False) -> PatchResult | None:
        """Go on to the next patch that needs a person; None: all have moved.

        ``guess`` resolves it provisionally instead, so that those after it can be tried.
        """
        stops = self.move.stops
        while (name := stopped_in(self.folder)) is not None:
            if name in stops and stops[name].answer == _DROPPED:
                self._rebase("--skip")
                continue
            if unmerged := self._unmerged():
                stops[name] = self._stop(name, unmerged)
                if not guess:
                    return stops[name]
                for path in self._texts(unmerged):
                    path.write_bytes(_HUNK.sub(_guess, path.read_bytes()))
                self.git("add", "--all")
                self.git("rerere", "clear")  # a guess is nothing to remember
            elif not self._committed:
                stops.setdefault(name, PatchResult(name, Verdict.CONFLICT, answer="remembered"))
            self._rebase("--continue" if self._committed or self._commit() else "--skip")
        return None

    def _commit(self) -> bool:
        """Commit the index with the patch's message; returns whether there was a change."""
        if self.git("write-tree") == self.git("rev-parse", "HEAD^{tree}"):
            return False
        self.git("commit", "--quiet", "--no-verify", "--cleanup=verbatim", "-C", "REBASE_HEAD")
        return True

    def skip(self, name: str, reason: str) -> None:
        """Leave out the patch that stopped."""
        stop = self.move.stops[name]
        told = (*stop.detail, f"left out: {reason}")
        self.move.stops[name] = replace(stop, stops=False, detail=told, answer=_DROPPED)

    def answer(self, name: str) -> None:
        """Take what a person made of the patch that stopped: its files, or a commit of them."""
        by_hand = self._committed
        problems = [
            f"{path}: exists on one side only: git add or git rm it"
            for path, stages in self._unmerged().items()
            # such a file has no markers, so nothing shows that a person has looked at it
            if not {"2", "3"} <= stages or not (self.folder / path).exists()
        ]
        for file in self.move.stops[name].files:
            path = self.folder / file
            if path.is_file() and _MARKER.search(path.read_bytes()):
                problems.append(f"{file}: still has conflict markers")
        new = self.git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
        problems += [f"{file}: new: git add it, or remove it" for file in new if file]
        if by_hand and (changed := self.git("status", "--porcelain", "--untracked-files=no")):
            problems.append(f"uncommitted changes: {changed}")
        if problems:
            msg = f"{self.folder}: not resolved:\n  " + "\n  ".join(problems)
            raise UsageError(msg, "fix these, then --continue")
        if not by_hand:
            self.git("--literal-pathspecs", "add", "--update", ".")
            if not self._commit():
                msg = f"{name}: the work tree has no change of it"
                raise UsageError(msg, "drop it: --skip REASON")

    def _unmerged(self) -> dict[str, set[str]]:
        """Return the files in conflict: their stages (1 base, 2 the new release, 3 the patch)."""
        files: dict[str, set[str]] = {}
        for line in filter(None, self.git("ls-files", "-u", "-z").split("\0")):
            meta, path = line.split("\t", 1)
            files.setdefault(path, set()).add(meta[-1])
        return files

    def _texts(self, files: Iterable[str]) -> list[Path]:
        paths = [self.folder / file for file in files]
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    # -- verdicts ------------------------------------------------------------------------------

    def _stop(self, name: str, unmerged: Collection[str]) -> PatchResult:
        (patch,) = (one for one in self.patches.values() if one.name == name)
        paths = {entry.path for entry in patch.entries}
        fresh = {entry.path for entry in patch.entries if entry.added}
        gone = sorted(paths - git.blobs_at(self.folder, "HEAD", paths).keys() - fresh)
        detail, verdict = [], Verdict.CONFLICT
        for path in self._texts(unmerged):
            if kinds := Counter(map(_kind, _HUNK.finditer(path.read_bytes()))):
                counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                detail.append(f"{path.relative_to(self.folder)}: {counts}")
        if renamed := sorted({*unmerged} - paths):
            if gone:
                verdict = Verdict.TARGET_RENAMED
                detail.insert(0, f"{', '.join(gone)} is {', '.join(renamed)} now")
        elif deleted := [path for path in gone if path in unmerged]:
            verdict = Verdict.TARGET_DELETED
            detail.insert(0, f"{', '.join(deleted)} is deleted")
        return PatchResult(name, verdict, True, tuple(detail), tuple(unmerged))

    def results(self) -> list[PatchResult]:
        """Return the result of each patch; all have moved."""
        move, stops = self.move, self.move.stops
        log = ("log", "--notes=patches", "--format=%H%x00%N%x01", f"{move.new.commit}..HEAD")
        entries = (entry.strip().split("\0") for entry in self.git(*log).split("\x01"))
        # a commit that is dropped leaves its name at the one before it, behind that one's own
        left = {entry[1].split()[0]: entry[0] for entry in entries if entry[1:] and entry[1]}
        moved = {old: left[one.name] for old, one in self.patches.items() if one.name in left}
        found = self._unseen(moved)
        results = []
        for old, patch in self.patches.items():
            stop = stops.get(patch.name)
            if old in moved:
                result = self._moved(old, moved[old], patch)
                if stop is not None:
                    answer = stop.answer or "resolved by hand"
                    result = replace(stop, stops=False, answer=answer)
                detail = (*result.detail, *found[moved[old]])
                result = replace(result, commit=moved[old], detail=detail)
            elif stop is None:
                why = "the new release has it: merging leaves no change"
                result = PatchResult(patch.name, Verdict.UPSTREAMED, detail=(why,))
            else:
                if stop.answer != _DROPPED:
                    self.skip(patch.name, "by git rebase --skip")
                result = stops[patch.name]
            results.append(result)
        return results

    def _unseen(self, moved: Mapping[str, str]) -> dict[str, list[str]]:
        """Return what git cannot see in patches that merged, as lines, by their new commits.

        Names that a patch uses and the new release lacks, and what is wrong with Python files.
        """
        tree, move = self.folder, self.move
        # tests and docs, which do not ship, keep old names for long
        others = [rule.repo for rule in move.target.paths if rule.wheel is None and not rule.build]
        within = ("--", ".", *(f":(exclude,literal){folder}" for folder in others))
        used = {}
        for new in moved.values():
            diff = self.git("diff-tree", "-p", "--no-renames", f"{new}^", new, *within)
            added = re.findall(r"^\+(?!\+\+ )(.*)", diff, re.MULTILINE)
            words = {word for line in added for word in _WORD.findall(line)}
            # names of code, not prose
            used[new] = {word for word in words if "_" in word or word[1:] != word[1:].lower()}
        there = _present(tree, set().union(*used.values()), move.old.commit, within)
        lost = there - _present(tree, there, move.new.commit, within)
        # the checkout's own environment of tests has ruff
        path = f"{self.project.root}/.venv-dev/bin:{os.environ.get('PATH', '')}"
        ruff, found = shutil.which("ruff", path=path), {}
        for old, new in moved.items():
            gone = sorted(used[new] & lost)
            found[new] = [f"uses {name}, which the new release no longer has" for name in gone]
            found[new] += _broken(tree, ruff, old, new)
        return found

    def _moved(self, old: str, commit: str, patch: Patch) -> PatchResult:
        """Return the result of a patch that merged by itself."""
        changed = {change.path for change in git.changes(self.folder, f"{commit}^", commit)}
        paths = {entry.path for entry in patch.entries}
        gone, fresh = sorted(paths - changed), sorted(changed - paths)
        if gone and fresh:
            detail = (f"{', '.join(gone)} is {', '.join(fresh)} now: followed",)
            return PatchResult(patch.name, Verdict.TARGET_RENAMED, detail=detail)
        # they are a pair, however much one shrank
        how = ("--no-color", "--no-dual-color", "--creation-factor=999")
        told = self.git("range-diff", *how, f"{old}^!", f"{commit}^!")
        head, _, body = told.partition("\n")
        verdict = Verdict.CHANGED if _OWN.search(body) else Verdict.CONTEXT_ONLY
        return PatchResult(patch.name, Verdict.CLEAN if _SAME.match(head) else verdict)


def dry_run(project: Project, move: Move) -> list[PatchResult]:
    """Return the result of each patch on another release, conflicts resolved by a guess."""
    with project.store.temporary("rebase") as work:
        mover = Mover(project, move, work / "tree")
        mover.start()
        mover.advance(guess=True)
        stops = {name: stop for name, stop in move.stops.items() if stop.stops}
        return [stops.get(one.patch, one) for one in mover.results()]


# -- conflicts -----------------------------------------------------------------------------------

_MARKER = re.compile(rb"^(<{7}|\|{7}|>{7})( |\r?$)", re.MULTILINE)  # ======= may be a heading
_HUNK = re.compile(
    rb"^<{7}[^\n]*\n(.*?)^\|{7}[^\n]*\n(.*?)^={7}\r?\n(.*?)^>{7}[^\n]*\n?", re.MULTILINE | re.DOTALL
)
_IMPORT = re.compile(rb"(from \S+ import\b|import\s|#\s*include\b|[\w.]+( as \w+)?,$|[()]+$)")


def _kind(hunk: re.Match[bytes]) -> Literal["imports", "both insert", "overlap"]:
    """Return the kind of a hunk: lines of the new release, of the base and of the patch."""
    lines = map(bytes.strip, b"".join(hunk.groups()).splitlines())
    if all(_IMPORT.match(line) for line in lines if line):
        return "imports"
    return "overlap" if hunk[2].strip() else "both insert"


def _guess(hunk: re.Match[bytes]) -> bytes:
    """Return a provisional resolution: both sides, or where they overlap the patch's."""
    return hunk[3] if _kind(hunk) == "overlap" else hunk[1] + hunk[3]


# -- what merged ---------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,}")


def _present(tree: Path, names: set[str], commit: str, within: Iterable[str]) -> set[str]:
    """Return those names that a commit has as words."""
    if not names:
        return set()
    # one pattern: many are slow
    _, listing = git.attempt(tree, "grep", "-howIE", "|".join(sorted(names)), commit, *within)
    return names & {*listing.splitlines()}


def _broken(tree: Path, ruff: str | None, old: str, new: str) -> list[str]:
    """Return what is wrong with Python files after a patch and was not before it."""
    lines = []
    for change in git.changes(tree, f"{new}^", new):
        if change.path.endswith(".py") and change.status != "D":
            found = _problems(tree, ruff, change.new_blob)
            before = {change.old_blob, *git.blobs_at(tree, old, [change.path]).values()}
            for blob in before - {git.ABSENT} if found else ():
                found -= _problems(tree, ruff, blob)
            lines += [f"{change.path}: {what}" for what in found]
    return lines


def _problems(tree: Path, ruff: str | None, blob: str) -> Counter[str]:
    """Return what is wrong with a Python file, without line numbers: each patch moves them."""
    found: Counter[str] = Counter()
    text = git.git(tree, "cat-file", "blob", blob)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "file", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        found[f"does not compile: {getattr(error, 'msg', error)}"] += 1
    if ruff is not None:
        how = ("--isolated", "--select=F821,F811", "--output-format=json", "--exit-zero")
        words = ("check", "--no-cache", *how, "--stdin-filename=file.py", "-")
        done = call(ruff, *words, stdin=text.encode(errors="surrogateescape"))
        for one in json.loads(done.stdout):
            if one["code"] in ("F821", "F811"):
                found[re.sub(r" from line \d+", "", one["message"])] += 1
    return found
