"""Read objects of a repository through one ``git cat-file --batch``, run by GitPython.

Importing GitPython takes as long as 15 to 20 calls of git (0.1 s), so only commands that read many
objects use this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.core import gitsafe
from sparkforge.core.errors import CommandError
from sparkforge.core.log import log

if TYPE_CHECKING:
    from git import Git


@contextmanager
def reading(repo: Path) -> Iterator[Reader]:
    """Read objects of a repository, isolated like every other git; for one thread."""
    gitsafe.isolated(repo, "rev-parse")  # an error if git refuses it, or there is none
    from git import Git

    log.detail(f"+ git -C {repo} cat-file --batch")
    process = Git()
    process.set_persistent_git_options(C=str(repo))
    process.update_environment(**gitsafe.environment(repo))
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

    def blob(self, name: str) -> bytes:
        """Return an object's content."""
        try:
            _, _, size, data = self._process.get_object_data(name)
            if len(data) == size:
                return data
            why = "damaged"  # git ends within such an object, which GitPython does not report
        except (ValueError, OSError) as error:
            why = str(error)
        with gitsafe.explained(self._repo):
            raise CommandError(f"git cat-file --batch in {self._repo}: {name}: {why}")
