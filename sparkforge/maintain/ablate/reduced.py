"""Series with patches left out, as far as the others merge, and a checkout of them.

Tests and commands find it by two variables:

SPARKFORGE_CHECKOUT   whose pins.yaml and patches/ count (tests/patches/checkout.py)
SPARKFORGE_STORE      a store that borrows downloads, sources and wheelhouses, and is removed with
                      the results of the reduced series
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, SeriesError
from sparkforge.pins import edit
from sparkforge.series import series, staging
from sparkforge.series.series import Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

CHECKOUT = "SPARKFORGE_CHECKOUT"


@dataclass(frozen=True)
class Reduced:
    """A series without some of its patches."""

    source: Source
    """The source under it."""
    commit: str
    tree: str
    """``commit``, ``tree``: its result there."""
    files: tuple[tuple[str, bytes], ...]
    """Name and bytes of each patch left, in order, in canonical form."""
    left_out: tuple[str, ...]
    """The patches that were to be left out, in the series' order."""
    dependents: tuple[str, ...] = ()
    """Later patches that do not merge without those."""

    @property
    def upstream(self) -> str:
        return self.source.upstream


def without(store: Store, whole: Series, source: Source, names: Sequence[str]) -> Reduced:
    """Return a series without some of its patches; the later ones are merged (three-way).

    Raises:
        SeriesError: the series does not apply, or has no such patch.
    """
    if unknown := set(names) - {patch.name for patch in whole.patches}:
        msg = f"{whole.folder}: does not contain {', '.join(sorted(unknown))}"
        raise SeriesError(msg, "see build.py patches list")
    # its commits hold the blobs that a three-way merge starts from
    series.apply(store, whole, source)
    paths = [entry.path for patch in whole.patches for entry in patch.entries]
    dependents = []
    with (
        series.writing(store, source),
        store.temporary("ablate") as work,
        git.sparse_worktree(source.repo, work / "tree", source.commit, paths) as tree,
    ):
        for patch in whole.patches:
            if patch.name not in names and not _picked(tree, patch.path):
                dependents.append(patch.name)
        commit = git.git(tree, "rev-parse", "HEAD")
        files = series.export(source.repo, source.commit, commit)
    left_out = tuple(patch.name for patch in whole.patches if patch.name in names)
    return Reduced(source, commit, _tree(source, commit), tuple(files), left_out, tuple(dependents))


def prefix(store: Store, whole: Series, source: Source, count: int) -> Reduced:
    """Return the first ``count`` patches of a series, which apply as they are.

    Raises:
        SeriesError: the series does not apply.
    """
    last = series.apply(store, whole, source).commit
    commits = git.git(source.repo, "rev-list", "--reverse", f"{source.commit}..{last}").split()
    commit = [source.commit, *commits][count]
    kept, gone = whole.patches[:count], whole.patches[count:]
    files = tuple((patch.name, patch.path.read_bytes()) for patch in kept)
    return Reduced(
        source, commit, _tree(source, commit), files, tuple(patch.name for patch in gone)
    )


def _tree(source: Source, commit: str) -> str:
    return git.git(source.repo, "rev-parse", f"{commit}^{{tree}}")


def _picked(tree: Path, patch: Path) -> bool:
    """Apply one patch as a commit; False, and nothing changed, where it does not merge."""
    before = git.git(tree, "rev-parse", "HEAD")
    try:
        options = ("--3way", "--committer-date-is-author-date")
        git.git(tree, *series.AM, *options, str(patch.resolve()))
    except CommandError:
        git.git(tree, "am", "--abort")
        return False
    return git.git(tree, "rev-parse", "HEAD") != before  # the same if nothing of the patch is left


@dataclass(frozen=True)
class Place:
    """A checkout and a store in which the patches left count, and no others."""

    root: Path
    store: Store
    reduced: tuple[Reduced, ...]

    @property
    def env(self) -> dict[str, str]:
        """The variables by which tests and commands find it."""
        return {CHECKOUT: str(self.root), "SPARKFORGE_STORE": str(self.store.root)}


@contextmanager
def checkout(store: Store, root: Path, reduced: Sequence[Reduced]) -> Iterator[Place]:
    """Make a checkout that has reduced series instead of the whole ones.

    Raises:
        SeriesError: a reduced series does not apply as it should.
    """
    staged: list[tuple[Series, Source]] = []
    with store.temporary("ablate") as work:
        here = work / "checkout"
        here.mkdir()
        for path in root.iterdir():
            if path.name not in ("pins.yaml", "patches", "dist") and path.name[0] != ".":
                (here / path.name).symlink_to(path)
        shutil.copytree(root / "patches", here / "patches")
        shutil.copyfile(root / "pins.yaml", here / "pins.yaml")
        borrowed = store.borrowed(work / "store")
        try:
            for part in reduced:
                folder = here / "patches" / part.upstream
                fresh = staging.stage(borrowed, folder, part.files, part.source, part.tree)
                staged.append((fresh.series, part.source))
                edit.forget(here / "pins.yaml", part.upstream)
                if fresh.recorded is not None:
                    provider = part.source.provider
                    edit.record(here / "pins.yaml", part.upstream, provider, fresh.recorded)
            yield Place(here, borrowed, tuple(reduced))
        finally:
            for fresh_series, source in staged:
                series.forget(borrowed, fresh_series, source)
