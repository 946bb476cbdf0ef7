"""An upstream's series, applied: a commit in the store's repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build.context import Context, Item, Results, source_of
from sparkforge.core import git
from sparkforge.core.log import log
from sparkforge.series import series
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.pins.pins import Upstream
    from sparkforge.series.series import Series
    from sparkforge.store.artefact import Artefact


def series_item(
    context: Context, name: str, upstream: Upstream, patches: Series, source_item: Item
) -> Item:
    """Return the patched tree of an upstream."""
    inputs = {
        "source": dict(source_item.inputs),
        "series": patches.sha256,
        "patches": {patch.name: patch.sha256 for patch in patches.patches},
        "recorded": {kind: record.tree for kind, record in upstream.patched.items()},
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        source = source_of(context.store, name, results[source_item.label])
        patched = series.apply_recorded(context.store, patches, source, upstream)
        known = source.provider in upstream.patched
        note = "as recorded" if known else f"from {source.provider}, not recorded in pins.yaml"
        log.info(f"{name}: {len(patches.patches)} patch(es), tree {patched.tree[:12]} ({note})")
        return {
            "source": source.commit,
            "commit": patched.commit,
            "tree": patched.tree,
            "touched": dict(patched.touched),
        }

    repo = context.store.git_path(name)

    def stands(artefact: Artefact) -> bool:
        # the source may have been fetched anew, this time from git and not from the release file
        source = context.store.find(source_item.stage, source_item.inputs)
        same = source is None or source.outputs["commit"] == artefact.outputs["source"]
        return same and git.has_commit(repo, artefact.outputs["commit"])

    return Item(
        "series",
        f"series {name}",
        inputs,
        make,
        valid=stands,
    )
