"""A throw-away copy of the checkout, in which a move is tried before it lands."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.disk import disk_errors, write_file

_ENVIRONMENTS = {".venv": "requirements/driver.txt", ".venv-dev": "requirements/dev.txt"}


def make(root: Path, folder: Path, files: Mapping[Path, bytes | None]) -> None:
    """Copy a checkout to a folder, which is replaced, with some files changed (None: removed).

    What git ignores is not copied.
    """
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for name in _names(root):
            to = folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to, follow_symlinks=False)
        for path, data in files.items():
            to = folder / path.relative_to(root)
            if data is None:
                to.unlink(missing_ok=True)
            else:
                write_file(to, data)


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files of a copy, by path in it."""
    for name, text in texts.items():
        write_file(folder / name, text.encode())


def lend_environments(root: Path, folder: Path) -> None:
    """Link the environments of a checkout into its copy, where its locks for them are the same."""
    for name, lock in _ENVIRONMENTS.items():
        mine, theirs = root / lock, folder / lock
        if (root / name).is_dir() and mine.read_bytes() == theirs.read_bytes():
            (folder / name).symlink_to((root / name).resolve())


def _names(root: Path) -> list[str]:
    """Return the files of a checkout, by name below it."""
    if git.git_ok(root, "rev-parse", "--is-inside-work-tree"):
        words = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        listed = git.git(root, *words).split("\0")
        return [name for name in listed if name and os.path.lexists(root / name)]
    hidden = {"dist", ".git", ".sparkforge", *_ENVIRONMENTS}
    return [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*"))
        if path.relative_to(root).parts[0] not in hidden and not path.is_dir()
    ]
