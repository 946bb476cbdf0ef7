"""Source trees of the pinned upstreams, as released and with their series, for tests to import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.sources import sources
from sparkforge.sources.sources import Access
from tests.patches.checkout import CHECKOUT, store


def tree(upstream: str, folder: Path, *, patched: bool, only: Sequence[str] = ()) -> Path:
    """Check an upstream's tree out into a new folder: its release's, or the one we make of it.

    Args:
        only: paths of the repository, of which plain files are made, which is faster; none: a clone
            of the whole.
    """
    loaded = pins.load(CHECKOUT / "pins.yaml").upstream(upstream)
    kept = store()
    access = Access(Index(), {}, offline=False)
    source = sources.ensure(kept, upstream, loaded, RELEASE_PLAN, access)
    commit = source.commit
    if patched:
        commit = series.apply(kept, series.read(CHECKOUT / "patches" / upstream), source).commit
    if not only:
        git.clone_at(source.repo, folder, commit)
        return folder
    git.unpack(source.repo, commit, only, folder)
    return folder
