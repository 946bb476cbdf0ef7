"""A command's checkout: its pins, the store, the access to its sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sparkforge.core import git
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import UsageError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.pins import Pins
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
APT = "apt"  # the name of a base image's archive in --mirror
PinsFile = Annotated[Path | None, Parameter(show=False)]
"""Type of --pins: another checkout's pins.yaml, for tests."""


@Parameter(name="*", group="store and network")
@dataclass(frozen=True, kw_only=True)
class ProjectOptions:
    """Options for a command's pins.yaml, store and sources."""

    pins: PinsFile = None
    store: Path | None = None
    """cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)"""
    offline: bool = False
    """use no network, only the store"""
    mirror: tuple[str, ...] = ()
    """UPSTREAM=URL-or-path: fetch this upstream's commit from there; apt=URL: snapshots of the
    base image's archive; may be repeated"""


def store_of(named: str | Path | None) -> Store:
    """Return the store of --store, else of SPARKFORGE_STORE, else in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "sparkforge")
    try:
        root = Path(named or os.environ.get("SPARKFORGE_STORE") or default).expanduser().resolve()
    except RuntimeError as error:  # no HOME, and an unknown user; a loop of links
        raise UsageError(f"no folder for the store: {error}", "give one with --store DIR") from None
    git.check_owner(root)  # its files are installed and served
    return Store(root)


@dataclass(frozen=True)
class Checkout:
    """A checkout with its pins."""

    pins_path: Path
    pins: Pins

    @property
    def root(self) -> Path:
        """Its folder: ``patches/``, ``requirements/`` and ``dist/`` are in it."""
        return self.pins_path.parent


def checkout(named: Path | None) -> Checkout:
    """Return the checkout of --pins, or sparkforge's own; raises as ``pins.load``."""
    try:
        path = (named or ROOT / "pins.yaml").resolve()
    except RuntimeError as error:
        raise UsageError(f"--pins {named}: a loop of links", "give another file") from error
    return Checkout(path, pins.load(path))


@dataclass(frozen=True)
class Project(Checkout):
    """A checkout, the store, and the access to its sources."""

    store: Store
    access: Access

    @classmethod
    def open(cls, options: ProjectOptions) -> Project:
        """Read pins.yaml, and find the store."""
        here = checkout(options.pins)
        access = Access(Index(), mirrors(options.mirror, here.pins), options.offline)
        return cls(here.pins_path, here.pins, store_of(options.store), access)

    def series_folder(self, upstream: str) -> Path:
        """Return the folder of an upstream's patches."""
        return self.root / "patches" / upstream

    @contextmanager
    def locked(self) -> Iterator[Project]:
        """Lock the checkout against changes by other commands, and read it again."""
        from filelock import FileLock  # most commands change nothing

        folder = self.root / ".sparkforge"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            lock = FileLock(folder / "lock")
            lock.acquire()
        try:
            yield replace(self, pins=pins.load(self.pins_path))
        finally:
            lock.release()


def mirrors(texts: Sequence[str], all_pins: Pins) -> dict[str, str]:
    """Return the URL or path of each --mirror, by upstream, UPSTREAM/EXTERNAL or ``apt``."""
    found = {}
    for text in texts:
        name, _, url = text.partition("=")
        upstream, _, external = name.partition("/")
        known = all_pins.upstream(upstream).externals if url and name != APT else {}
        odd = name == APT and "://" not in url
        if not url or odd or (external and external not in known):
            msg = f"--mirror {text}: not UPSTREAM[/EXTERNAL]=URL-or-path, or {APT}=URL"
            names = ", ".join(sorted({*all_pins.upstreams, *known, APT}))
            raise UsageError(msg, f"for example --mirror vllm=/src/vllm; there are {names}")
        found[name] = url
    return found
