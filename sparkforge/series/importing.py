"""Patches from outside → commits of a series."""

import re
from collections.abc import Sequence
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, SeriesError
from sparkforge.series.exporting import Chain
from sparkforge.series.series import AM, Patched, Series
from sparkforge.store.store import Store

_DIFF = re.compile(rb"\A\s*(diff --git |--- |Index: )")


def chain(store: Store, series: Series, patched: Patched, files: Sequence[Path]) -> Chain:
    """Return the series' commits, and behind them those of mails with patches.

    SeriesError: a file is no such mail, or does not apply there.
    """
    source = patched.source
    paths = [path for file in files for path in _paths(file)]
    paths += [entry.path for patch in series.patches for entry in patch.entries]
    with (
        store.temporary("import") as work,
        git.sparse_worktree(source.repo, work / "tree", patched.commit, paths) as tree,
    ):
        for file in files:
            _apply(tree, series.upstream, file)
        return Chain(source, git.git(tree, "rev-parse", "HEAD"), {})


def _paths(file: Path) -> list[str]:
    """Return the paths that a patch touches, on both sides of a rename."""
    try:
        how = ("apply", "--numstat", "-z", str(file.resolve()))
        nowhere = {"GIT_CEILING_DIRECTORIES": "/", "GIT_DIR": "/dev/null"}
        listing = git.git(Path(), *how, env=nowhere)
    except CommandError as error:
        msg = f"{file}: not a patch that git can read:\n{error}"
        raise SeriesError(msg, "create it with git format-patch, or download the .patch") from None
    return [field.rpartition("\t")[2] for field in listing.split("\0") if field]


def _apply(tree: Path, upstream: str, file: Path) -> None:
    """Apply one file in a worktree, as commits."""
    before = git.git(tree, "rev-parse", "HEAD")
    hint = (
        f"do it by hand: build.py patches apply {upstream} DIR, there git am --3way FILE (of a"
        " plain diff git apply --3way, and commit), then build.py patches export DIR"
    )
    if _DIFF.match(file.read_bytes()):
        raise SeriesError(f"{file}: a diff has no message", hint)
    try:
        git.git(tree, *AM, "--3way", str(file.resolve()))
    except CommandError as error:
        raise SeriesError(f"{file}: does not apply:\n{error}", hint) from None
    if git.git(tree, "rev-parse", "HEAD") == before:
        raise SeriesError(f"{file}: contains no patch", "create it with git format-patch")
