"""External sources of an upstream's build: commits in the store's repositories."""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.compile import externals
from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results
from sparkforge.build.results import ExternalResult
from sparkforge.core import git
from sparkforge.sources.download import Fetches
from sparkforge.store.codekey import code_of


def external_item(context: Context, upstream: str, external: str) -> Item[ExternalResult]:
    """Return a repository that an upstream's build would fetch, at its pinned commit."""
    pin = context.pins.upstream(upstream).externals[external]
    inputs = {"commit": pin.commit, "code": code_of(__name__)}
    full = f"{upstream}/{external}"

    def make(folder: Path, results: Results) -> ExternalResult:
        fetched = externals.ensure(context.store, full, pin, context.access)
        return ExternalResult(fetched.commit, fetched.repo.name, fetched.named())

    return Item(
        "sources",
        f"external {full}",
        inputs,
        ExternalResult,
        make,
        valid=lambda artefact: git.has_commit(
            context.store.git_path(artefact.result.repository.removesuffix(".git")), pin.commit
        ),
        fetches=lambda: Fetches(unknown=(f"{full} by git",)),
    )
