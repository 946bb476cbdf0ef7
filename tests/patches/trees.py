"""Source trees of the pinned upstreams, as released and with their series, for tests to import."""

from __future__ import annotations

from pathlib import Path

from sparkforge import git, pins, series, sources
from sparkforge.index import Index
from sparkforge.pins import SourcePlan
from sparkforge.sources import Access
from tests.patches.checkout import CHECKOUT, store


def tree(upstream: str, folder: Path, *, patched: bool) -> Path:
    """Check an upstream's tree out into a new folder: its release's, or the one we make of it."""
    loaded = pins.load(CHECKOUT / "pins.yaml").upstream(upstream)
    kept = store()
    access = Access(Index(), {}, offline=False)
    source = sources.ensure(kept, upstream, loaded, SourcePlan(provider="release"), access)
    commit = source.commit
    if patched:
        commit = series.apply(kept, series.read(CHECKOUT / "patches" / upstream), source).commit
    git.clone_at(source.repo, folder, commit)
    return folder
