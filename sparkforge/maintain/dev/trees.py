"""Lasting work trees of a series: made once, updated without touching equal files.

Build tools go by dates. So a file keeps its date unless its content changes, also
where git writes it twice on the way (a rebase takes the developer's commits off and puts them on
again).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, SeriesError
from sparkforge.core.log import counted, log
from sparkforge.series import worktree
from sparkforge.series.series import Patched, Series
from sparkforge.series.worktree import WorkTree


def ensure(patched: Patched, series: Series, folder: Path) -> WorkTree:
    """Return the work tree of a series in a folder: made, or brought up to date.

    One with changes that are not committed stays as it is, with a warning.

    Raises:
        UsageError: something else is in the folder.
        SeriesError: it is a work tree of another upstream.
    """
    if not folder.exists():
        patches = counted(len(series.patches), "patch", "patches")
        log.info(f"{folder}: {series.upstream} with {patches}")
        return worktree.make(patched, series, folder)
    tree = worktree.read(folder)
    if tree.upstream != series.upstream:
        msg = f"{folder}: is a work tree of {tree.upstream}, not of {series.upstream}"
        raise SeriesError(msg, "give another folder with --dir")
    if series.sha256 in tree.series and patched.source.commit == tree.base:
        return tree
    try:
        worktree.settled(tree)
    except SeriesError as error:
        log.warning(f"the series changed; the work tree was not updated: {error.what}")
        return tree
    return _moved(tree, patched, series)


def _moved(tree: WorkTree, patched: Patched, series: Series) -> WorkTree:
    """Move a work tree onto the current series, with the developer's own commits on top."""
    tip = tree.git("rev-parse", "--verify", worktree.TIP_REF)
    own = tree.git("rev-list", "--reverse", f"{tip}..HEAD").split()
    if not git.git_ok(tree.folder, "merge-base", "--is-ancestor", tip, "HEAD"):
        log.warning(
            f"{tree.folder}: the series and its commits here both changed: the work tree was not"
            " updated (create a new one and cherry-pick)"
        )
        return tree
    before = tree.head
    tree.git("fetch", "--quiet", str(patched.source.repo), patched.commit)
    with kept_dates(tree):
        try:
            tree.git("reset", "--quiet", "--keep", patched.commit)
            if own:
                tree.git("cherry-pick", "--allow-empty", "--no-gpg-sign", *own)
        except CommandError as error:
            if (tree.folder / ".git" / "CHERRY_PICK_HEAD").exists():
                tree.git("cherry-pick", "--abort")
            tree.git("reset", "--quiet", "--keep", before)
            log.warning(
                f"{tree.folder}: {counted(len(own), 'commit of yours does', 'commits of yours do')}"
                f" not apply to the new series; the work tree was not updated:\n{error}"
            )
            return tree
    mine = counted(len(own), "commit")
    log.info(f"{tree.folder}: updated to the new series, with {mine} of yours on top")
    return worktree.rebased(tree, patched, series)


@contextmanager
def kept_dates(tree: WorkTree) -> Iterator[None]:
    """Restore the dates of files that the block leaves with the same content."""
    before = _dates(tree)
    yield
    after = _dates(tree)
    for path, (blob, date) in before.items():
        if path in after and after[path] != (blob, date) and after[path][0] == blob:
            file = tree.folder / path
            os.utime(file, ns=(file.stat().st_atime_ns, date))
    tree.git("update-index", "-q", "--refresh")  # it holds the dates, too


def _dates(tree: WorkTree) -> dict[str, tuple[str, int]]:
    """Return blob and date of each file; the tree is clean, so the index knows the contents."""
    result = {}
    for entry in filter(None, tree.git("ls-files", "-s", "-z").split("\0")):
        meta, path = entry.split("\t", 1)
        mode, blob, _ = meta.split(" ")
        if mode.startswith("100"):
            result[path] = (f"{mode} {blob}", (tree.folder / path).stat().st_mtime_ns)
    return result
