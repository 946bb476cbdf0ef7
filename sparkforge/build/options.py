"""Resolve options: store, pins, sources, platform, series."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core import generated, gitsafe, transaction
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.index import Index
from sparkforge.core.log import log
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


def store_of(options: argparse.Namespace) -> Store:
    """Return the store of --store, else of SPARKFORGE_STORE, else in the user's cache folder.

    Raises:
        UsageError: none is named, and the user has no home folder.
        StoreError: it is another user's.
    """
    chosen = options.store or os.environ.get("SPARKFORGE_STORE")
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


def pins_path(options: argparse.Namespace) -> Path:
    """Return where pins.yaml is, with no change of its checkout left half done."""
    path: Path = (options.pins or ROOT / "pins.yaml").resolve()
    transaction.finish(path.parent)
    return path


def access_of(options: argparse.Namespace, all_pins: Pins) -> Access:
    """Return how sources may be reached: --mirror, --offline, and the index of pip's settings.

    Raises:
        UsageError: a --mirror is malformed, or is of no upstream or external that pins.yaml has.
    """
    mirrors = {}
    for text in options.mirror:
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
        mirrors[name] = url
    return Access(Index(), mirrors, options.offline)


def source_plan(options: argparse.Namespace, default: SourcePlan) -> SourcePlan:
    """Return where sources come from: --source, else the default.

    Raises:
        UsageError: --source and --mirror contradict each other.
    """
    mirrored = [
        name for name, _, _ in (text.partition("=") for text in options.mirror) if "/" not in name
    ]
    if options.source == "release" and mirrored:
        msg = f"--source release uses no git repository, but --mirror gives one for {mirrored[0]}"
        raise UsageError(msg, "omit one of them")
    return SOURCES[options.source] if options.source else default


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


def chosen_series(options: argparse.Namespace, root: Path, all_pins: Pins) -> list[series.Series]:
    """Return the series of the upstream that is named, else all, in the order of pins.yaml.

    Raises:
        UsageError: there is no such upstream.
        SeriesError: a series is malformed, or belongs to no upstream.
    """
    names = [options.upstream] if options.upstream else list(all_pins.upstreams)
    unknown = {path.parent.name for path in (root / "patches").glob("*/series")}
    unknown -= set(all_pins.upstreams)
    if unknown:
        msg = f"patches/{sorted(unknown)[0]}: pins.yaml has no upstream of that name"
        raise SeriesError(msg, "rename the folder, or add the upstream to pins.yaml")
    for name in names:
        all_pins.upstream(name)
    return [series.read(root / "patches" / name) for name in names]


def settle(options: argparse.Namespace, wanted: Mapping[Path, str], command: str) -> int:
    """Write generated files, or with --check compare them with the files; report.

    Raises:
        StaleError: with --check, one differs.
    """
    changed = generated.settle(wanted, command, check=options.check)
    for path in wanted:
        log.info(f"{path}: {'written' if path in changed else 'up to date'}")
    if options.json:
        log.json({"written": [str(path) for path in changed]})
    return 0
