"""Release files of the pins, for tests that hold something against what upstream published."""

from __future__ import annotations

import zipfile
from pathlib import Path

from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.sources import sources
from sparkforge.sources.sources import Access
from tests.patches.checkout import CHECKOUT, store


def release_file(upstream: str, name: str) -> Path:
    """Return a release file of an upstream by its name in pins.yaml, from the store or fetched."""
    file = pins.load(CHECKOUT / "pins.yaml").upstream(upstream).files[name]
    return sources.fetch_release_file(store(), file, Access(Index(), {}, offline=False))


def unpack(wheel: Path, prefix: str, folder: Path) -> None:
    """Unpack the members of a wheel below ``prefix`` into a folder, without the prefix."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and not member.endswith("/"):
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
