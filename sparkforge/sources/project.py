"""A command's checkout: its pins, the store, the access to its sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sparkforge.core import gitsafe
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import StoreError, UsageError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.pins import Pins
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

ROOT = Path(__file__).resolve().parents[2]


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
    """UPSTREAM=URL-or-path: fetch this upstream's commit from there; may be repeated"""


def store_of(named: str | Path | None) -> Store:
    """Return the store of --store, else of SPARKFORGE_STORE, else in the user's cache folder.

    Raises:
        UsageError: no store is named, and the user has no home folder.
        StoreError: it is another user's.
    """
    chosen = named or os.environ.get("SPARKFORGE_STORE")
    try:
        if not chosen:
            # by its specification a path that is not absolute is ignored
            cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
            if not cache.is_absolute():
                if not Path(os.environ.get("HOME", "/")).is_absolute():
                    msg = "HOME is not an absolute path"
                    raise RuntimeError(msg)  # as Path.home() does without one
                cache = Path.home() / ".cache"
            chosen = cache / "sparkforge"
        root = Path(chosen).expanduser().resolve()
    except RuntimeError as error:  # no HOME, and an unknown user
        raise UsageError(f"no folder for the store: {error}", "give one with --store DIR") from None
    gitsafe.check_owner(root)  # its files are installed and served
    return Store(root)


def pins_file(named: Path | None) -> Path:
    """Return the pins.yaml of --pins; None: that of sparkforge's own checkout."""
    return (named or ROOT / "pins.yaml").resolve()


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
    """Return the checkout of --pins.

    Raises:
        PinsError: pins.yaml is missing or invalid.
    """
    path = pins_file(named)
    return Checkout(path, pins.load(path))


@dataclass(frozen=True)
class Project(Checkout):
    """A checkout, the store, and the access to its sources.

    With ``locked``, its pins were read after the checkout was locked.
    """

    store: Store
    access: Access

    @classmethod
    def open(cls, options: ProjectOptions) -> Project:
        """Read pins.yaml, and find the store.

        Raises:
            PinsError: pins.yaml is missing or invalid.
            UsageError: no store can be found, or a --mirror is invalid.
            StoreError: the store is another user's.
        """
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
            try:
                folder.mkdir(exist_ok=True)
                lock = FileLock(folder / "lock")
                lock.acquire()
            except (FileExistsError, NotADirectoryError):
                raise StoreError(f"{folder}: is not a folder", "move it away") from None
        try:
            yield replace(self, pins=pins.load(self.pins_path))
        finally:
            lock.release()


def mirrors(texts: Sequence[str], all_pins: Pins) -> dict[str, str]:
    """Return the URL or path of each --mirror, by upstream or UPSTREAM/EXTERNAL.

    Raises:
        UsageError: one is malformed, or pins.yaml has no such upstream or external.
    """
    found = {}
    for text in texts:
        name, separator, url = text.partition("=")
        if not separator or not url:
            msg = f"--mirror {text}: not UPSTREAM=URL-or-path"
            raise UsageError(
                msg,
                f"for example --mirror vllm=/src/vllm; upstreams:"
                f" {', '.join(sorted(all_pins.upstreams))}",
            )
        upstream, _, external = name.partition("/")
        known = all_pins.upstream(upstream).externals
        if external and external not in known:
            msg = f"--mirror {text}: {upstream} has no external {external}"
            raise UsageError(msg, f"use one of {', '.join(sorted(known)) or 'none'}")
        found[name] = url
    return found
