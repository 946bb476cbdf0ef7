"""Read commits, trees and blobs of a repository through one ``git cat-file --batch``.

GitPython runs that process and parses trees. git itself resolves names and finds objects:
GitPython's own readers of references, configuration and object files ignore git's owner check and
miss damage.

Importing GitPython takes as long as 15 to 20 calls of git (0.1 s). So only commands that read many
objects use this module.
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

_TREE = 0o40000
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

    variables = {**gitsafe.environment(repo), **(env or {})}
    log.detail(f"+ git -C {repo} cat-file --batch")
    process = Git()
    process.set_persistent_git_options(C=str(repo))  # a missing folder is git's error
    process.update_environment(**variables)
    try:
        yield Reader(repo, process)
    finally:
        process.clear_cache()  # ends it


class Reader:
    """Reader of objects by any name for ``git rev-parse``; ``reading`` creates it.

    An unreadable object is a CommandError; a damaged or foreign repository is a StoreError.
    """

    def __init__(self, repo: Path, process: Git) -> None:
        self._repo = repo
        self._process = process
        self._trees: dict[str, dict[str, File]] = {}

    def find(self, name: str) -> tuple[str, bytes] | None:
        """Return an object's id and content; None: no such object."""
        try:
            id_, _, size, data = self._process.get_object_data(name)
        except (ValueError, OSError) as error:
            if _UNRESOLVED in str(error):
                return None
            raise self._failure(name) from error
        if len(data) != size:  # git ends within a damaged object, which GitPython does not report
            raise self._failure(name)
        return os.fsdecode(id_), data  # GitPython returns bytes

    def _failure(self, name: str) -> CommandError:
        """Return the error of a process that ended before its answer."""
        child = self._process.cat_file_all
        stderr = b"" if child is None else child.stderr.read()
        gitsafe.check_dubious(stderr)
        return self._error(name, stderr.decode(errors="replace").strip() or "no answer")

    def _error(self, name: str, why: str) -> CommandError:
        with gitsafe.explained(self._repo):
            raise CommandError(f"git cat-file --batch in {self._repo}: {name}: {why}")

    def _found(self, name: str) -> tuple[str, bytes]:
        found = self.find(name)
        if found is None:
            raise self._error(name, "no such object")
        return found

    def blob(self, name: str) -> bytes:
        """Return a blob's content; raises as ``find``, and CommandError if there is none."""
        return self._found(name)[1]

    def commit(self, name: str) -> Commit:
        """Return a commit. Raises as ``blob``."""
        commit = self._commit(name)
        if commit is None:
            raise self._error(name, "no such commit")
        return commit

    def _commit(self, name: str) -> Commit | None:
        found = self.find(f"{name}^{{commit}}")
        if found is None:
            return None
        head, _, message = found[1].partition(b"\n\n")
        fields = [line.split(b" ", 1) for line in head.split(b"\n")]  # signatures are indented
        tree, *_ = (value.decode() for key, value in fields if key == b"tree")
        parents = tuple(value.decode() for key, value in fields if key == b"parent")
        coding = next(
            (value.decode("ascii", "replace") for key, value in fields if key == b"encoding"),
            "utf-8",
        )
        return Commit(found[0], tree, parents, _decoded(message, coding))

    def chain(self, base: str, tip: str) -> list[Commit]:
        """Return the commits after one, oldest first, up to another.

        Args:
            base: a full id.

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

    def files(self, tree: str, folder: str = "") -> Iterator[File]:
        """Yield every file of a tree or commit, or of a folder in it, in git's order."""
        inside = self._folder(tree, folder)
        for file in self._entries(inside).values() if inside is not None else ():
            if int(file.mode, 8) != _TREE:
                yield file
                continue
            for inner in self.files(file.id):
                yield File(f"{file.path}/{inner.path}", inner.mode, inner.id)

    def at(self, tree: str, path: str) -> File | None:
        """Return the file of a path in a tree or commit; None: missing, or a folder."""
        folder, _, name = path.rpartition("/")
        inside = self._folder(tree, folder)
        entry = None if inside is None else self._entries(inside).get(name)
        return None if entry is None or int(entry.mode, 8) == _TREE else entry

    def _folder(self, tree: str, folder: str) -> str | None:
        """Return the tree of a folder in a tree or commit, or None."""
        for name in filter(None, folder.split("/")):
            entry = self._entries(tree).get(name)
            if entry is None or int(entry.mode, 8) != _TREE:
                return None
            tree = entry.id
        return tree

    def content(self, tree: str, path: str) -> bytes | None:
        """Return the content of a path in a tree or commit; None: no such file."""
        file = self.at(tree, path)
        return None if file is None else self.blob(file.id)

    def _entries(self, tree: str) -> dict[str, File]:
        if tree not in self._trees:
            from git.objects.fun import tree_entries_from_data

            entries = tree_entries_from_data(self._found(f"{tree}^{{tree}}")[1])
            self._trees[tree] = {
                name: File(name, f"{mode:06o}", id_.hex()) for id_, mode, name in entries
            }
        return self._trees[tree]


def _decoded(message: bytes, coding: str) -> str:
    try:
        text = message.decode(codecs.lookup(coding).name, "surrogateescape")
    except (LookupError, UnicodeError, ValueError):  # unknown, or of a codec without such errors
        text = message.decode("utf-8", "surrogateescape")
    return text.rstrip("\n")
