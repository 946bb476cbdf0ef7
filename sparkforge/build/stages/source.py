"""An upstream's pinned tree: a commit in the store's repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results
from sparkforge.build.results import SourceResult
from sparkforge.core import git
from sparkforge.core.log import human_bytes
from sparkforge.sources import sources
from sparkforge.sources.download import Fetches
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.pins.pins import Upstream


def chosen(context: Context, name: str) -> dict[str, str | None]:
    """Return the provider of an upstream's source: the target's, or git for a mirror."""
    plan = context.target.source
    if name in context.access.mirrors:
        return {"provider": "git", "fallback": None}
    return {"provider": plan.provider, "fallback": plan.fallback}


def source_item(context: Context, name: str, upstream: Upstream) -> Item[SourceResult]:
    """Return the source of an upstream."""
    plan = context.target.source
    file = upstream.files[upstream.source_file] if upstream.source_file else None
    inputs = {
        "commit": upstream.commit_or_unknown,
        "tag": upstream.tag,
        **chosen(context, name),
        "release_file": file.sha256 if file else None,
        # where a wheel's files belong
        "paths": [rule.model_dump() for rule in upstream.paths]
        if file and file.file.endswith(".whl")
        else None,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> SourceResult:
        source = sources.ensure(context.store, name, upstream, plan, context.access)
        return SourceResult(source.provider, source.commit, source.tree, source.origin)

    repo = context.store.git_path(name)

    def fetches() -> Fetches:
        here = upstream.commit is not None and git.has_commit(repo, upstream.commit)
        return Fetches() if here else Fetches(unknown=by_git)

    size = f" (release file: {human_bytes(file.size)})" if file else ""
    by_git = (f"{name} by git{size}",) if inputs["provider"] == "git" else ()
    return Item(
        "sources",
        f"source {name}",
        inputs,
        SourceResult,
        make,
        valid=lambda artefact: git.has_commit(repo, artefact.result.commit),
        download=(file,) if file and inputs["provider"] == "release" else (),
        fetches=fetches,
    )
