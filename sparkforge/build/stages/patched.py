"""An upstream's series, applied: a commit in the store's repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results, source_of
from sparkforge.build.results import SeriesResult, SourceResult
from sparkforge.core import git
from sparkforge.core.log import counted, log
from sparkforge.series import series
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.pins.pins import Upstream
    from sparkforge.series.series import Series
    from sparkforge.store.artefact import Artefact


def series_item(
    context: Context,
    name: str,
    upstream: Upstream,
    patches: Series,
    source_item: Item[SourceResult],
) -> Item[SeriesResult]:
    """Return the patched tree of an upstream."""
    inputs = {
        "source": dict(source_item.inputs),
        "series": patches.sha256,
        "patches": {patch.name: patch.sha256 for patch in patches.patches},
        "recorded": {kind: record.tree for kind, record in upstream.patched.items()},
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> SeriesResult:
        source = source_of(context.store, name, results.of(source_item))
        patched = series.apply_recorded(context.store, patches, source, upstream)
        known = source.provider in upstream.patched
        note = "as recorded" if known else f"from {source.provider}, not recorded in pins.yaml"
        count = counted(len(patches.patches), "patch", "patches")
        log.info(f"{name}: {count}, tree {patched.tree[:12]} ({note})")
        return SeriesResult(source.commit, patched.commit, patched.tree, dict(patched.touched))

    repo = context.store.git_path(name)

    def stands(artefact: Artefact[SeriesResult]) -> bool:
        # the source may have been fetched anew, this time from git and not from the release file
        source = source_item.find(context.store)
        same = source is None or source.result.commit == artefact.result.source
        return same and git.has_commit(repo, artefact.result.commit)

    return Item(
        "series",
        f"series {name}",
        inputs,
        SeriesResult,
        make,
        needs=(source_item,),
        valid=stands,
    )
