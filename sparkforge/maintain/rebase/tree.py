"""The repository in which git rebases a series, and in which a person resolves conflicts.

It borrows the store's objects (``alternates``) and keeps its own index, files and rerere cache.
git's own files say how far a rebase is: ``git status`` explains it, and git's commands work there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git, gitsafe
from sparkforge.core.errors import CommandError

_CONFIG = {
    "rerere.enabled": "true",  # remember resolutions …
    "rerere.autoUpdate": "true",  # … and stage the files that they resolve
    "merge.conflictStyle": "diff3",  # a conflict shows the common base
    "merge.directoryRenames": "true",  # a new file goes where its folder went
    "merge.renameLimit": "20000",  # vLLM's releases move hundreds of files at once
    "diff.renameLimit": "20000",
    "core.autocrlf": "false",
    "gc.auto": "0",
    "notes.rewriteRef": "refs/notes/patches",  # a commit's patch, through rebases and amends
    "advice.detachedHead": "false",
    "user.name": gitsafe.COMMITTER,
    "user.email": gitsafe.COMMITTER_EMAIL,
    "commit.gpgSign": "false",
}
_PICK = ("--quiet", "--empty=drop", "--reapply-cherry-picks", "--no-autosquash", "--no-verify")


@dataclass(frozen=True)
class Unmerged:
    """One file in conflict: its blobs by stage (1 base, 2 the new release, 3 the patch)."""

    path: str
    blobs: dict[int, str]


@dataclass
class Tree:
    """A working tree whose repository borrows another's objects."""

    path: Path
    output: str = ""
    """What the last ``git rebase`` printed."""

    @classmethod
    def make(cls, path: Path, repo: Path) -> Tree:
        """Make one without files, or return the one that is there, freed from a killed git."""
        if path.exists():
            git.tidy(path / ".git")
            return cls(path)
        fresh = path.with_name(f"{path.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        git.git(fresh, "init", "--quiet", "--template=", "--initial-branch=main", ".")
        own = fresh / ".git"
        (own / "objects" / "info").mkdir(parents=True, exist_ok=True)
        (own / "objects" / "info" / "alternates").write_text(f"{repo.resolve() / 'objects'}\n")
        if (repo / "shallow").exists():  # the store fetches commits without their history
            shutil.copyfile(repo / "shallow", own / "shallow")
        for key, value in _CONFIG.items():
            git.git(fresh, "config", key, value)
        fresh.rename(path)
        return cls(path)

    def git(self, *args: str) -> str:
        """Run git in it, isolated from the user's settings."""
        return git.git(self.path, *args)

    @property
    def stopped(self) -> str | None:
        """The commit at which a rebase stopped; None: none is in progress."""
        if not (self.path / ".git" / "rebase-merge").is_dir():
            return None
        return self.git("rev-parse", "--verify", "REBASE_HEAD")

    @property
    def head(self) -> str:
        return self.git("rev-parse", "--verify", "HEAD")

    def start(self, old: str, names: Mapping[str, str], new: str) -> None:
        """Rebase commits on ``old`` onto ``new``, up to the first conflict.

        What is in progress there is forgotten: the remains of a killed run.

        Args:
            names: of the commits, in order.
        """
        for commit, name in names.items():
            self.git("notes", "--ref=patches", "add", "--force", "--message", name, commit)
        tip = [old, *names][-1]
        shutil.rmtree(self.path / ".git" / "rebase-merge", ignore_errors=True)
        for name in ("CHERRY_PICK_HEAD", "MERGE_MSG", "MERGE_RR", "AUTO_MERGE", "REBASE_HEAD"):
            (self.path / ".git" / name).unlink(missing_ok=True)
        self.git("update-ref", "--no-deref", "HEAD", tip)
        self.git("read-tree", "--reset", "-u", tip)
        self.git("clean", "-ffdxq")
        self.rebase(*_PICK, "--onto", new, old)

    def moved(self, new: str) -> dict[str, str]:
        """Return the commits on ``new`` so far, by the names of those they were made from.

        A commit that is dropped leaves its name at the one before it, behind that one's own.
        """
        log = ("log", "--notes=patches", "--format=%H%x00%N%x01", f"{new}..HEAD")
        entries = [entry.strip().split("\0") for entry in self.git(*log).split("\x01")]
        names = {entry[0]: entry[1].split()[0] for entry in entries if entry[1:] and entry[1]}
        # git moves the notes at the end
        rewritten = self.path / ".git" / "rebase-merge" / "rewritten-list"
        for line in rewritten.read_text().splitlines() if rewritten.exists() else ():
            old, made = line.split()
            names.setdefault(made, self.git("notes", "--ref=patches", "show", old))
        return {name: commit for commit, name in names.items() if commit != new}

    def rebase(self, *words: str) -> None:
        """Run ``git rebase`` up to its end or the next conflict.

        Raises:
            CommandError: it failed in another way.
        """
        before = self.stopped
        code, self.output = git.attempt(self.path, "-c", "core.editor=true", "rebase", *words)
        if code and self.stopped in (None, before):
            raise CommandError(f"git rebase {' '.join(words)} in {self.path}:\n{self.output}")

    def proceed(self, message_of: str) -> str | None:
        """Commit the resolved files and go on; returns the commit, None if nothing is left.

        Args:
            message_of: the commit whose message, author and date it gets.
        """
        if self.git("write-tree") == self.git("rev-parse", "HEAD^{tree}"):
            self.rebase("--skip")
            return None
        self.commit(message_of)
        made = self.head
        self.rebase("--continue")
        return made

    def commit(self, message_of: str) -> None:
        """Commit the index like another commit."""
        self.git("commit", "--quiet", "--no-verify", "--cleanup=verbatim", "-C", message_of)

    def unmerged(self) -> list[Unmerged]:
        """Return the files in conflict."""
        files: dict[str, Unmerged] = {}
        for line in filter(None, self.git("ls-files", "-u", "-z").split("\0")):
            meta, path = line.split("\t", 1)
            _, blob, stage = meta.split(" ")
            files.setdefault(path, Unmerged(path, {})).blobs[int(stage)] = blob
        return list(files.values())

    def blob(self, name: str | None) -> bytes:
        """Return a blob's content; without a name, nothing."""
        return git.git_bytes(self.path, "cat-file", "blob", name) if name else b""
