"""Options that commands share, and their meaning."""

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar, dataclass_transform

from cyclopts import Parameter
from cyclopts.types import ExistingFile, PositiveFloat, PositiveInt, UInt16

from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.pins.pins import Pins, SourcePlan, Target
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.series import series
from sparkforge.sources.project import PinsFile, ProjectOptions

T = TypeVar("T")
SourceName = SourcePlan | None
"""Type of --source."""
Behind = Annotated[tuple[str, ...], Parameter(parse=False)]
"""Type of the field for the arguments after ``--``, which ``cli/main.py`` fills."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def command_options(options: type[T]) -> type[T]:
    """Make a command's options of a class: each field is one, with the text below it as its help.

    cyclopts looks up a field's type in the module of its class, so these inherit only those below.
    It knows no positional field after an inherited one.
    """
    return Parameter(name="*")(dataclass(frozen=True, kw_only=True)(options))


@Parameter(name="*", group="output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Output options; every command has them."""

    json: bool = False
    """print one JSON document to stdout, even on failure"""
    verbose: Annotated[bool, Parameter(alias="-v")] = False
    """print every command that is run"""


@command_options
class CheckoutOptions:
    """Options of a command that reads the checkout alone."""

    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


@command_options
class StoreOptions:
    """Options of a command that reads checkout and store."""

    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@Parameter(name="*", group="what is built (default: as in pins.yaml, or as in the last build)")
@dataclass(frozen=True, kw_only=True)
class VariantOptions:
    """Options that choose a build of a target, and change its result."""

    source: SourceName = None
    """release files; git: commits of the pinned tags; auto: git, or release files if git is
    unreachable"""
    engine: Annotated[str, Parameter(choices=("auto", "docker", "none"))] = "auto"
    """container engine; none: a virtual environment"""
    base: str | None = None
    """base image: NAME@sha256:… or a local image"""
    wheels: Annotated[str | None, Parameter(choices=("overlay", "compile"))] = None
    """overlay: replace the patched files in the release wheel (default); compile: build from the
    patched tree in a container"""
    pack: Annotated[str | None, Parameter(choices=("default", "all", "none"))] = None
    """FlashInfer's modules that are compiled ahead of time: those that the profiles load, also
    those of other options, or none"""


@Parameter(name="*", group="tools")
@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options of a build that do not change its result."""

    ca_bundle: ExistingFile | None = None
    """CA certificates for the image's build steps, for example of a proxy"""
    jobs: PositiveInt | None = None
    """parallel compilers of wheels and packs (default: as many as fit in memory)"""


@Parameter(name="*", group="server")
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server of the smoke test, or of a command that starts one."""

    port: UInt16 = 0
    """loopback port (default: a free one; serve: 8000 where it is free)"""
    ready_timeout: PositiveFloat | None = None
    """time limit of the server's start in seconds (default: 300; serve: none)"""


@command_options
class ServingOptions(StoreOptions):
    """Options of a command that builds a target and starts its server."""

    arguments: Behind = ()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


def usual_target() -> str:
    """The target that fits this machine, where no command names one."""
    return "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"


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
    """Return the series of the upstream that is named, else all, in the order of pins.yaml."""
    names = [upstream] if upstream else list(all_pins.upstreams)
    unknown = {path.parent.name for path in (root / "patches").glob("*/series")}
    unknown -= set(all_pins.upstreams)
    if unknown:
        msg = f"patches/{sorted(unknown)[0]}: pins.yaml has no upstream of that name"
        raise SeriesError(msg, "rename the folder, or add the upstream to pins.yaml")
    for name in names:
        all_pins.upstream(name)
    return [series.read(root / "patches" / name) for name in names]
