"""Upstream's commits between two releases, from a clone: their changes and reverts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparkforge.core import git
from sparkforge.sources.sources import Source

_REVERTS = re.compile(r"\b[Tt]his reverts commit ([0-9a-f]{7,40})\b")


@dataclass(frozen=True)
class Made:
    """A change that upstream made."""

    commit: str
    """That made it last, abbreviated."""
    undone: str | None
    """The commit that reverted it after that, abbreviated; None: none was found."""


@dataclass(frozen=True)
class History:
    """Upstream's commits between two releases."""

    repo: Path
    old: str
    new: str

    @classmethod
    def of(cls, repo: Path | None, old: Source, new: Source) -> History | None:
        """Return the history between two sources; None if it is not available.

        A release file has none, and the store fetches single commits; a clone has it.
        """
        if repo is None or "release" in (old.provider, new.provider):
            return None
        if not git.git_ok(repo, "merge-base", old.commit, new.commit):
            return None
        return cls(repo, old.commit, new.commit)

    def cause(self, path: str) -> str | None:
        """Return the last commit that touched a deleted file, and its effect."""
        span = f"{self.old}..{self.new}"
        last = ("log", "--full-history", "-1", "--format=%h %s", span, "--", path)
        text = git.git(self.repo, *last)
        if not text:
            return None
        show = ("show", "--format=", "--name-status", "--find-renames", "-l0", "-z")
        status = git.git(self.repo, *show, text.partition(" ")[0])
        fields = status.split("\0")
        for kind, before, after in zip(fields, fields[1:], fields[2:], strict=False):
            if before == path and kind.startswith("R"):
                return f"{text} (renames {path} to {after})"
        return f"{text} (deletes {path})"

    def touching(self, path: str) -> list[str]:
        """Return the last three commits of a file, newest first: ``SHA subject (PATH)``."""
        newest = ("log", "-3", "--no-merges", "--format=%h %s", f"{self.old}..{self.new}")
        text = git.git(self.repo, *newest, "--", path)
        return [f"{line} (changes {path})" for line in text.splitlines()]

    def made(self, change: str, reverse: str) -> Made | None:
        """Return the last commit that made a change, and the one that reverted it since.

        Args:
            change: the change's patch-id.
            reverse: the patch-id of its reverse.
        """
        undone = None
        for patch_id, commit in self._changes:  # newest first
            if patch_id == reverse and undone is None:
                undone = commit
            if patch_id == change:
                undone = undone or self._reverted_by(commit)
                return Made(commit[:12], undone and undone[:12])
        return None

    def _reverted_by(self, commit: str) -> str | None:
        """Return the commit that reverts another and is not reverted itself."""
        for reverted, by in self._reverts:
            if commit.startswith(reverted) and self._reverted_by(by) is None:
                return by
        return None

    @cached_property
    def _changes(self) -> list[tuple[str, str]]:
        """(patch-id, commit) of each commit between the two, newest first."""
        words = ("log", "-p", "--topo-order", "--no-merges", "--full-index", "--no-renames")
        log = git.git_bytes(self.repo, *words, f"{self.old}..{self.new}")
        listing = git.git(self.repo, "patch-id", "--stable", stdin=log)
        pairs = (line.split(" ") for line in listing.splitlines())
        return [(patch, commit) for patch, commit in pairs]

    @cached_property
    def _reverts(self) -> list[tuple[str, str]]:
        """(commit that is reverted, maybe abbreviated; commit that says so)."""
        words = ("log", "-z", "--no-merges", "--grep=[Tt]his reverts commit", "--format=%H%n%B")
        log = git.git(self.repo, *words, f"{self.old}..{self.new}")
        reverts = []
        for text in filter(None, log.split("\0")):
            commit, _, message = text.strip("\n").partition("\n")
            reverts += [(reverted, commit) for reverted in _REVERTS.findall(message)]
        return reverts
