"""Series with patches left out, and a checkout of them.

Tests and commands find it by two variables: SPARKFORGE_CHECKOUT, whose pins.yaml and patches/
count (tests/patches/checkout.py), and SPARKFORGE_STORE, a store that borrows downloads, sources
and wheelhouses.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError
from sparkforge.pins import edit, pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, series
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store

CHECKOUT = "SPARKFORGE_CHECKOUT"


@dataclass(frozen=True)
class Reduced:
    """A series without some of its patches."""

    source: Source
    commit: str
    """Its result on the source."""
    dependents: tuple[str, ...] = ()
    """Later patches that do not merge without those that were left out."""


def source(project: Project, own: Series) -> Source:
    """Return the source that a series applies to."""
    pinned = project.pins.upstream(own.upstream)
    return sources.ensure(project.store, own.upstream, pinned, RELEASE_PLAN, project.access)


def without(store: Store, whole: Series, source: Source, name: str) -> Reduced:
    """Return a series without one of its patches; the later ones are merged (three-way).

    Raises:
        SeriesError: the series does not apply.
    """
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
            if patch.name != name and not _picked(tree, patch.path):
                dependents.append(patch.name)
        return Reduced(source, git.git(tree, "rev-parse", "HEAD"), tuple(dependents))


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


def prefixes(store: Store, whole: Series, source: Source) -> list[Reduced]:
    """Return the series without all of its patches, with the first one, and so on.

    Raises:
        SeriesError: the series does not apply.
    """
    last = series.apply(store, whole, source).commit
    commits = git.git(source.repo, "rev-list", "--reverse", f"{source.commit}..{last}").split()
    return [Reduced(source, commit) for commit in (source.commit, *commits)]


@contextmanager
def checkout(project: Project, reduced: Sequence[Reduced]) -> Iterator[Project]:
    """Make a checkout that has reduced series instead of the whole ones.

    Raises:
        SeriesError: a reduced series does not apply as it should.
    """
    root, store = project.root, project.store
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
                source, folder = part.source, here / "patches" / part.source.upstream
                files = series.export(source.repo, source.commit, part.commit)
                tree = git.git(source.repo, "rev-parse", f"{part.commit}^{{tree}}")
                fresh = exporting.stage(borrowed, folder, files, source, tree)
                staged.append((fresh.series, source))
                edit.forget(here / "pins.yaml", source.upstream)
                if fresh.recorded is not None:
                    provider = source.provider
                    edit.record(here / "pins.yaml", source.upstream, provider, fresh.recorded)
            path = here / "pins.yaml"
            yield replace(project, pins_path=path, pins=pins.load(path), store=borrowed)
        finally:
            for fresh_series, source in staged:
                series.forget(borrowed, fresh_series, source)


def variables(project: Project) -> dict[str, str]:
    """Return the variables by which tests and commands find a checkout."""
    return {CHECKOUT: str(project.root), "SPARKFORGE_STORE": str(project.store.root)}
