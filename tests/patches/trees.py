"""Source trees and release files of the pinned upstreams, as released and with their series."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

from sparkforge.core import git
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.series.series import Patched
from sparkforge.sources import sources
from sparkforge.wheels import overlay
from tests.patches.checkout import ACCESS, CHECKOUT, PINS, store


def patched_of(upstream: str, *, patched: bool = True) -> Patched:
    """Return an upstream's release with its series, or as it is."""
    source = sources.ensure(store(), upstream, PINS.upstream(upstream), RELEASE_PLAN, ACCESS)
    if not patched:
        return Patched(source, source.commit, source.tree)
    return series.apply(store(), series.read(CHECKOUT / "patches" / upstream), source)


def layer(upstream: str, *, patched: bool = True) -> overlay.Layer:
    """Return the same as a layer for wheels."""
    return overlay.Layer(patched_of(upstream, patched=patched), PINS.upstream(upstream).paths)


def tree(upstream: str, folder: Path, *, patched: bool, only: Sequence[str] = ()) -> Path:
    """Check an upstream's tree out into a new folder: its release's, or the one we make of it.

    Args:
        only: paths of the repository, of which plain files are made, which is faster; none: a clone
            of the whole.
    """
    made = patched_of(upstream, patched=patched)
    if not only:
        git.clone_at(made.source.repo, folder, made.commit)
    else:
        git.unpack(made.source.repo, made.commit, only, folder)
    return folder


def release_file(upstream: str, name: str) -> Path:
    """Return a release file of an upstream by its name in pins.yaml, from the store or fetched."""
    return sources.fetch_release_file(store(), PINS.upstream(upstream).files[name], ACCESS)


def unpack(wheel: Path, prefix: str, folder: Path) -> None:
    """Unpack the members of a wheel below ``prefix`` into a folder, without the prefix."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and not member.endswith("/"):
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
