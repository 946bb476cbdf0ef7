"""An upstream's series, applied: a commit in the store's repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge import git, series
from sparkforge.codekey import code_of
from sparkforge.context import Context, Item, Results, source_of
from sparkforge.log import log

if TYPE_CHECKING:
    from sparkforge.pins import Upstream
    from sparkforge.series import Series


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
        if source.provider not in upstream.patched:
            log.warning(
                f"{name}: pins.yaml records no patched tree for sources from {source.provider};"
                f" this one is {patched.tree} (build.py pins record)"
            )
        log.info(f"{name}: {len(patches.patches)} patch(es), tree {patched.tree[:12]}")
        return {"commit": patched.commit, "tree": patched.tree, "touched": dict(patched.touched)}

    repo = context.store.git_path(name)
    return Item(
        "series", f"series {name}", inputs, make,
        valid=lambda artefact: git.has_commit(repo, artefact.outputs["commit"]),
    )  # fmt: skip
