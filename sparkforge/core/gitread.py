"""Read commits and blobs of a repository through one ``git cat-file --batch``, run by GitPython.

Importing GitPython takes as long as 15 to 20 calls of git (0.1 s), so only commands that read many
objects use this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.core import gitsafe
from sparkforge.core.errors import CommandError
from sparkforge.core.log import log

if TYPE_CHECKING:
    from git import Git


@dataclass(frozen=True)
class Commit:
    """A commit. Its message: without the last line end; undecodable bytes as surrogates."""

    id: str
    tree: str
    parents: tuple[str, ...]
    message: str


@contextmanager
def reading(repo: Path, env: Mapping[str, str] | None = None) -> Iterator[Reader]:
    """Read objects of a repository, isolated like every other git; for one thread."""
    gitsafe.isolated(repo, "rev-parse")  # an error if git refuses it, or there is none
    from git import Git

    log.detail(f"+ git -C {repo} cat-file --batch")
    process = Git()
    process.set_persistent_git_options(C=str(repo))
    process.update_environment(**gitsafe.environment(repo), **(env or {}))
    try:
        yield Reader(repo, process)
    finally:
        process.clear_cache()  # ends it


class Reader:
    """Reader of objects by any name for ``git rev-parse``; ``reading`` creates it.

    A missing or unreadable object is a CommandError, one of a damaged repository a StoreError.
    """

    def __init__(self, repo: Path, process: Git) -> None:
        self._repo, self._process = repo, process

    def _read(self, name: str) -> tuple[str, bytes]:
        try:
            id_, _, size, data = self._process.get_object_data(name)
            if len(data) == size:
                return os.fsdecode(id_), data  # GitPython returns bytes
            why = "damaged"  # git ends within such an object, which GitPython does not report
        except (ValueError, OSError) as error:
            why = str(error)
        with gitsafe.explained(self._repo):
            raise CommandError(f"git cat-file --batch in {self._repo}: {name}: {why}")

    def blob(self, name: str) -> bytes:
        """Return an object's content."""
        return self._read(name)[1]

    def commit(self, name: str) -> Commit:
        """Return a commit."""
        id_, data = self._read(f"{name}^{{commit}}")
        head, _, message = data.partition(b"\n\n")
        fields = [os.fsdecode(line).partition(" ") for line in head.split(b"\n")]
        parents = tuple(value for key, _, value in fields if key == "parent")
        text = message.decode(errors="surrogateescape").rstrip("\n")
        return Commit(id_, fields[0][2], parents, text)  # the tree comes first

    def chain(self, base: str, tip: str) -> list[Commit]:
        """Return the commits after one (a full id), oldest first, up to another.

        CommandError: one is a merge, or the history does not reach ``base``.
        """
        commits: list[Commit] = []
        while (commit := self.commit(tip)).id != base:
            if len(commit.parents) != 1:
                raise CommandError(f"{commit.id[:12]} has {len(commit.parents)} parents")
            commits.append(commit)
            (tip,) = commit.parents
        return commits[::-1]
