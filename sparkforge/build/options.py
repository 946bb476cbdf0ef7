"""Options that commands share, and what they stand for: the project, its store, its sources."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.core import gitsafe, transaction
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN, Pins, SourcePlan, Target
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.series import series
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

ROOT = Path(__file__).resolve().parents[2]
SOURCES: Mapping[str, SourcePlan] = {
    "release": RELEASE_PLAN,
    "git": SourcePlan(provider="git"),
    "auto": SourcePlan(provider="git", fallback="release"),
}
"""What --source can say."""


@dataclass(frozen=True)
class OutputOptions:
    """How a command reports; every command has them."""

    json: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class ProjectOptions:
    """Where a command works: pins.yaml of the checkout, the store, the network."""

    pins: Path | None = None
    store: Path | None = None
    offline: bool = False
    mirror: tuple[str, ...] = ()


@dataclass(frozen=True)
class VariantOptions:
    """Which build of a target: what its result depends on."""

    source: str | None = None
    engine: str = "auto"
    base: str | None = None
    wheels: str | None = None
    native: str | None = None


@dataclass(frozen=True)
class ToolOptions:
    """What a build works with, and what its result does not depend on."""

    builder: str | None = None
    ca_bundle: Path | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class ServerOptions:
    """The server of the smoke test, or of a command that starts one."""

    port: int = 0
    ready_timeout: float | None = None


def store_of(named: str | Path | None) -> Store:
    """Return the store of --store, else of SPARKFORGE_STORE, else in the user's cache folder.

    Raises:
        UsageError: none is named, and the user has no home folder.
        StoreError: it is another user's.
    """
    chosen = named or os.environ.get("SPARKFORGE_STORE")
    try:
        if not chosen:
            # its specification: a path that is not absolute is ignored
            cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
            if not cache.is_absolute():
                if not Path(os.environ.get("HOME", "/")).is_absolute():
                    msg = "HOME is not an absolute path"
                    raise RuntimeError(msg)  # as Path.home() does without one
                cache = Path.home() / ".cache"
            chosen = cache / "sparkforge"
        root = Path(chosen).expanduser().resolve()
    except RuntimeError as error:  # no HOME, and the user is in no list of users
        raise UsageError(f"no folder for the store: {error}", "give one with --store DIR") from None
    gitsafe.check_owner(root)  # what is in it is installed and served
    return Store(root)


def recover_checkout(named: Path | None) -> Path:
    """Finish a change of the checkout that a killed command left half done; return its pins.yaml.

    Args:
        named: of --pins; None: sparkforge's own checkout.
    """
    path = (named or ROOT / "pins.yaml").resolve()
    transaction.finish(path.parent)
    return path


@dataclass(frozen=True)
class Project:
    """A checkout with its pins, the store, and how its sources are reached."""

    pins_path: Path
    pins: Pins
    store: Store
    access: Access

    @classmethod
    def open(cls, options: ProjectOptions) -> Project:
        """Finish a change that a killed command left half done, then read pins.yaml.

        Raises:
            PinsError: pins.yaml is missing or invalid.
            UsageError: no store can be found, or a --mirror is invalid.
            StoreError: the store is another user's.
        """
        path = recover_checkout(options.pins)
        loaded = pins.load(path)
        access = Access(Index(), mirrors(options.mirror, loaded), options.offline)
        return cls(path, loaded, store_of(options.store), access)

    @property
    def root(self) -> Path:
        """The checkout: ``patches/``, ``requirements/`` and ``dist/`` are in it."""
        return self.pins_path.parent

    @contextmanager
    def locked(self) -> Iterator[Project]:
        """Keep other commands from changing the checkout; give it as it is then."""
        with transaction.held(self.root):
            yield replace(self, pins=pins.load(self.pins_path))


def mirrors(texts: Sequence[str], all_pins: Pins) -> dict[str, str]:
    """Return the URL or path of each --mirror, by upstream or UPSTREAM/EXTERNAL.

    Raises:
        UsageError: one is malformed, or is of no upstream or external that pins.yaml has.
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


def source_plan(source: str | None, access: Access, default: SourcePlan) -> SourcePlan:
    """Return where sources come from: --source, else the default.

    Raises:
        UsageError: --source and --mirror contradict each other.
    """
    mirrored = [name for name in access.mirrors if "/" not in name]
    if source == "release" and mirrored:
        msg = f"--source release uses no git repository, but --mirror gives one for {mirrored[0]}"
        raise UsageError(msg, "omit one of them")
    return SOURCES[source] if source else default


def platform_of(target: Target) -> Platform:
    """The target's platform: this machine's where it is among them, else its first."""
    here = MACHINES.get(platform.machine())
    return here if here in target.platforms else target.platforms[0]


def host_platform() -> Platform:
    """Return this machine's platform.

    Raises:
        UsageError: nothing is built on machines of this kind.
    """
    here = MACHINES.get(platform.machine())
    if here is None:
        msg = f"builds do not run on {platform.machine()}"
        raise UsageError(msg, f"use a machine with {', '.join(sorted(set(MACHINES.values())))}")
    return here


def chosen_series(upstream: str | None, root: Path, all_pins: Pins) -> list[series.Series]:
    """Return the series of the upstream that is named, else all, in the order of pins.yaml.

    Raises:
        UsageError: there is no such upstream.
        SeriesError: a series is malformed, or belongs to no upstream.
    """
    names = [upstream] if upstream else list(all_pins.upstreams)
    unknown = {path.parent.name for path in (root / "patches").glob("*/series")}
    unknown -= set(all_pins.upstreams)
    if unknown:
        msg = f"patches/{sorted(unknown)[0]}: pins.yaml has no upstream of that name"
        raise SeriesError(msg, "rename the folder, or add the upstream to pins.yaml")
    for name in names:
        all_pins.upstream(name)
    return [series.read(root / "patches" / name) for name in names]
