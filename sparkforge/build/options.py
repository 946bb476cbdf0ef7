"""Options that commands share, and what they stand for."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.pins.pins import RELEASE_PLAN, Pins, SourcePlan, Target
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.series import series
from sparkforge.sources.sources import Access

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
