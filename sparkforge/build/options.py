"""Options that commands share, and their meaning."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.command import count, grouped, option, port, positive, switch
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
"""Values of --source."""


def source_option(default: str) -> Any:
    """Declare --source; see ``source_plan``."""
    return option(
        "release: release files; git: commits of the pinned tags; auto: git, or the release"
        " file if git is unreachable",
        default_is=default,
        choices=tuple(SOURCES),
        group="sources",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Output options; every command has them."""

    json: bool = switch(
        "print one JSON document to stdout, even on failure", group="store and output"
    )
    verbose: bool = switch(
        "print every command that is run", "-v", "--verbose", group="store and output"
    )


@dataclass(frozen=True)
class VariantOptions:
    """Options that choose a build of a target, and change its result; see also ``as_last``."""

    source: str | None = source_option("targets.NAME.source in pins.yaml")
    engine: str = option(
        "container engine; none: a virtual environment",
        default="auto",
        default_is="auto",
        choices=("auto", "docker", "none"),
        group="image",
    )
    base: str | None = option(
        "base image: NAME@sha256:… or a local image", metavar="IMAGE", group="image"
    )
    wheels: str | None = option(
        "overlay: replace the patched files in the release wheel; compile: build from the"
        " patched tree in a container",
        default_is="overlay",
        choices=("overlay", "compile"),
        group="wheels",
    )
    pack: str | None = option(
        "FlashInfer's modules that are compiled ahead of time: those that the profiles load, all"
        " of build.py packs, or none",
        default_is="targets.NAME.pack in pins.yaml",
        choices=("default", "all", "none"),
        group="wheels",
    )


def as_last() -> Any:
    """Declare ``VariantOptions`` whose defaults are those of the last build."""
    return grouped(**dict.fromkeys(("source", "engine", "wheels", "pack"), "as in the last build"))


@dataclass(frozen=True)
class ToolOptions:
    """Options of a build that do not change its result."""

    builder: str | None = option(
        "buildx builder (default: the engine's own)", metavar="NAME", group="image"
    )
    ca_bundle: Path | None = option(
        "CA certificates for the image's build steps, for example of a proxy",
        type=Path,
        metavar="FILE",
        group="image",
    )
    jobs: int | None = option(
        "parallel compilers of wheels and packs (default: as many as fit in memory)",
        type=count,
        metavar="N",
        group="wheels",
    )


@dataclass(frozen=True)
class ServerOptions:
    """The server of the smoke test, or of a command that starts one."""

    port: int = option(
        "loopback port", default=0, default_is="a free port", type=port, metavar="N", group="server"
    )
    ready_timeout: float | None = option(
        "time limit of the server's start",
        default_is="300",
        type=positive,
        metavar="SECONDS",
        group="server",
    )


def source_plan(source: str | None, access: Access, default: SourcePlan) -> SourcePlan:
    """Return the plan for sources: --source, else the default.

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
    """Return this machine's platform; UsageError if nothing is built on machines of this kind."""
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
