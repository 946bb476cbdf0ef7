"""Source trees of the pinned upstreams, as released and with their series, for tests to import."""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge import git, pins, series, sources
from sparkforge.index import Index
from sparkforge.pins import SourcePlan
from sparkforge.sources import Access
from sparkforge.store import Store

ROOT = Path(__file__).resolve().parents[2]


def tree(upstream: str, folder: Path, *, patched: bool) -> Path:
    """Check an upstream's tree out into a new folder: its release's, or the one we make of it."""
    loaded = pins.load(ROOT / "pins.yaml").upstream(upstream)
    store = Store(
        Path(os.environ.get("SPARKFORGE_STORE", str(Path.home() / ".cache" / "sparkforge")))
    )
    access = Access(Index(), {}, offline=False)
    source = sources.ensure(store, upstream, loaded, SourcePlan(provider="release"), access)
    commit = source.commit
    if patched:
        commit = series.apply(store, series.read(ROOT / "patches" / upstream), source).commit
    git.clone_at(source.repo, folder, commit)
    return folder
