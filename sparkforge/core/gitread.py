"""Read commits, trees and blobs of a repository through one ``git cat-file --batch``.

GitPython runs that process; git itself resolves names and finds objects, with its checks of owners
and damage. Importing GitPython takes as long as 15 to 20 calls of git (0.1 s), so only commands
that read many objects use this module.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.core import gitsafe
from sparkforge.core.errors import CommandError
from sparkforge.core.log import log
from sparkforge.core.run import resolve

if TYPE_CHECKING:
    from git import Git

_UNRESOLVED = "could not be resolved"  # GitPython's message for git's "missing"


@dataclass(frozen=True)
class Commit:
    """A commit. Its message: without the last line end; undecodable bytes as surrogates."""

    id: str
    tree: str
    parents: tuple[str, ...]
    message: str


class NotLinear(Exception):
    """A history has a merge, or does not reach its base.

    Attributes:
        commit: the merge, or the last commit.
    """

    def __init__(self, commit: str) -> None:
        super().__init__(commit)
        self.commit = commit


@dataclass(frozen=True)
class File:
    """One file, link or submodule of a tree: its path with slashes, git mode and object."""

    path: str
    mode: str
    id: str


@contextmanager
def reading(repo: Path, env: Mapping[str, str] | None = None) -> Iterator[Reader]:
    """Read objects of a repository, isolated like every other git; for one thread.

    Raises:
        StoreError: it is another user's repository, or a damaged one.
        MachineError: git is not installed.
    """
    resolve(["git"])  # GitPython's import fails without it
    from git import Git

    log.detail(f"+ git -C {repo} cat-file --batch")
    process = Git()
    process.set_persistent_git_options(C=str(repo))  # a missing folder is git's error
    process.update_environment(**gitsafe.environment(repo), **(env or {}))
    try:
        yield Reader(repo, process)
    finally:
        process.clear_cache()  # ends it


class Reader:
    """Reader of objects by any name for ``git rev-parse``; ``reading`` creates it.

    An unreadable object is a CommandError, one of a damaged repository a StoreError.
    """

    def __init__(self, repo: Path, process: Git) -> None:
        self._repo = repo
        self._process = process

    def find(self, name: str) -> tuple[str, bytes] | None:
        """Return an object's id and content; None: no such object."""
        try:
            id_, _, size, data = self._process.get_object_data(name)
        except (ValueError, OSError) as error:
            if _UNRESOLVED in str(error):
                return None
            size, data = -1, b""
        if len(data) != size:  # git ends within a damaged object, which GitPython does not report
            child = self._process.cat_file_all
            said = b"" if child is None else child.stderr.read()
            gitsafe.check_dubious(said)
            raise self._error(name, said.decode(errors="replace").strip() or "no answer")
        return os.fsdecode(id_), data  # GitPython returns bytes

    def _error(self, name: str, why: str) -> CommandError:
        with gitsafe.explained(self._repo):
            raise CommandError(f"git cat-file --batch in {self._repo}: {name}: {why}")

    def blob(self, name: str) -> bytes:
        """Return an object's content; raises as ``find``, and CommandError if there is none."""
        found = self.find(name)
        if found is None:
            raise self._error(name, "no such object")
        return found[1]

    def commit(self, name: str) -> Commit:
        """Return a commit. Raises as ``blob``."""
        commit = self._commit(name)
        if commit is None:
            raise self._error(name, "no such commit")
        return commit

    def _commit(self, name: str) -> Commit | None:
        if (found := self.find(f"{name}^{{commit}}")) is None:
            return None
        head, _, message = found[1].partition(b"\n\n")
        fields = [line.partition(b" ") for line in head.split(b"\n")]  # signatures are indented
        values = {key: value.decode("ascii", "replace") for key, _, value in reversed(fields)}
        parents = tuple(value.decode() for key, _, value in fields if key == b"parent")
        text = _decoded(message, values.get(b"encoding", "utf-8"))
        return Commit(found[0], values[b"tree"], parents, text)

    def chain(self, base: str, tip: str) -> list[Commit]:
        """Return the commits after one (a full id), oldest first, up to another.

        Raises:
            NotLinear: one is a merge, or the history does not reach ``base``.
            CommandError, StoreError: as ``find``.
        """
        commits: list[Commit] = []
        name = tip
        while (commit := self._commit(name)) is not None and commit.id != base:
            if len(commit.parents) != 1:
                raise NotLinear(commit.id)
            commits.append(commit)
            (name,) = commit.parents
        if commit is None:  # a clone without the whole history
            raise NotLinear(name)
        return commits[::-1]

    def files(self, tree: str, *paths: str) -> Iterator[File]:
        """Yield every file of a tree or commit, or of paths in it, in git's order."""
        words = ("--literal-pathspecs", "ls-tree", "-r", "-z", tree, "--", *paths)
        for entry in filter(None, gitsafe.isolated(self._repo, *words).stdout.split(b"\0")):
            meta, _, path = entry.partition(b"\t")
            mode, _, id_ = meta.decode().split(" ")
            yield File(path.decode(errors="surrogateescape"), mode, id_)

    def content(self, tree: str, path: str) -> bytes | None:
        """Return the content of a file's path in a tree or commit; None: no such file."""
        found = [file.id for file in self.files(tree, path) if file.path == path]
        return self.blob(found[0]) if found else None


def _decoded(message: bytes, coding: str) -> str:
    try:
        text = message.decode(codecs.lookup(coding).name, "surrogateescape")
    except (LookupError, UnicodeError, ValueError):  # unknown, or of a codec without such errors
        text = message.decode("utf-8", "surrogateescape")
    return text.rstrip("\n")
