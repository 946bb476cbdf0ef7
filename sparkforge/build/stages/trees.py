"""An upstream's pinned tree and its patched one: commits in the store's repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build.cached import Cached
from sparkforge.build.context import Context
from sparkforge.build.results import SeriesResult, SourceResult
from sparkforge.core import git
from sparkforge.core.log import log
from sparkforge.pins.pins import ReleaseFile, SourcePlan
from sparkforge.series import series
from sparkforge.series.series import Patched
from sparkforge.sources import sources
from sparkforge.sources.download import Fetches
from sparkforge.sources.sources import Source
from sparkforge.store.store import Artefact

if TYPE_CHECKING:
    from sparkforge.wheels.overlay import Layer


def to_fetch(context: Context, file: ReleaseFile) -> Fetches:
    """Return the download of a release file, unless the store has it."""
    there = context.store.download_path(file.sha256, file.file).exists()
    return Fetches({} if there else {file.sha256: file.size})


def chosen(context: Context, name: str) -> SourcePlan:
    """Return the provider of an upstream's source: the build's, or git for a mirror."""
    return "git" if name in context.access.mirrors else context.source


def source_item(context: Context, name: str) -> Cached[SourceResult]:
    """Return the source of an upstream."""
    upstream, repo = context.upstream(name), context.store.git_path(name)
    file = upstream.files[upstream.source_file] if upstream.source_file else None
    inputs = {
        "commit": upstream.commit_or_unknown,
        "tag": upstream.tag,
        "provider": chosen(context, name),
        "release_file": file.sha256 if file else None,
        "paths": [rule.model_dump() for rule in upstream.paths],
    }

    def make(folder: Path) -> SourceResult:
        source = sources.ensure(context.store, name, upstream, context.source, context.access)
        return SourceResult(source.provider, source.commit, source.tree, source.origin)

    def fetches() -> Fetches:
        if file is not None and inputs["provider"] == "release":
            return to_fetch(context, file)
        if upstream.commit is not None and git.has_commit(repo, upstream.commit):
            return Fetches()
        return Fetches(unknown=(f"{name} by git",))

    return Cached(
        *("sources", f"source {name}", inputs, SourceResult, make),
        valid=lambda artefact: git.has_commit(repo, artefact.result.commit),
        fetches=fetches,
    )


def series_item(context: Context, name: str, source: Cached[SourceResult]) -> Cached[SeriesResult]:
    """Return the patched tree of an upstream."""
    upstream, patches = context.upstream(name), context.series_of(name)
    inputs = {
        "source": dict(source.inputs),
        "series": patches.sha256,
        "patches": {patch.name: patch.sha256 for patch in patches.patches},
        "recorded": {kind: record.tree for kind, record in upstream.patched.items()},
    }

    def make(folder: Path) -> SeriesResult:
        before = Tree(name, source, None).before(context)
        patched = series.apply_recorded(context.store, patches, before, upstream)
        known = before.provider in upstream.patched
        note = "as recorded" if known else f"from {before.provider}, not recorded in pins.yaml"
        log.info(f"{name}: patches: {len(patches.patches)}, tree {patched.tree[:12]} ({note})")
        return SeriesResult(before.commit, patched.commit, patched.tree, dict(patched.touched))

    def stands(artefact: Artefact[SeriesResult]) -> bool:
        # the source may have been fetched anew, this time from git and not from the release file
        now = source.find(context.store)
        same = now is None or now.result.commit == artefact.result.source
        repo = context.store.git_path(name)
        return same and git.has_commit(repo, artefact.result.commit)

    label = f"series {name}"
    return Cached("series", label, inputs, SeriesResult, make, (source,), valid=stands)


@dataclass(frozen=True)
class Tree:
    """An upstream's source, and its series where that has patches."""

    upstream: str
    source: Cached[SourceResult]
    series: Cached[SeriesResult] | None

    @property
    def items(self) -> tuple[Cached[Any], ...]:
        """What makes the tree."""
        return (self.source,) if self.series is None else (self.source, self.series)

    def before(self, context: Context) -> Source:
        """Return the source without patches."""
        made, repo = self.source.result, context.store.git_path(self.upstream)
        return Source(self.upstream, made.provider, repo, made.commit, made.tree, made.origin)

    def layer(self, context: Context) -> Layer:
        """Return the patched tree, and the places of its files in a wheel."""
        from sparkforge.wheels import overlay

        source = self.before(context)
        patched = Patched(source, source.commit, source.tree)
        if self.series is not None:
            made = self.series.result
            patched = Patched(source, made.commit, made.tree, made.touched)
        return overlay.Layer(patched, context.pins.upstream(self.upstream).paths)


def tree_of(context: Context, name: str) -> Tree:
    """Return an upstream's source and series."""
    series.check_emptied(context.series_of(name), context.upstream(name))
    source = source_item(context, name)
    patched = bool(context.series_of(name).patches)
    return Tree(name, source, series_item(context, name, source) if patched else None)
