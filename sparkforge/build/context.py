"""What is built (``Context``), and with which tools (``Tools``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.pins.pins import Pins, ReleaseFile, SourcePlan, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import series
from sparkforge.series.series import Series
from sparkforge.serving import memory
from sparkforge.serving.profile import Profile
from sparkforge.sources.project import Project

if TYPE_CHECKING:
    from sparkforge.runtime.engine import BaseImage, Engine

WHEELS = "wheels"  # the folder of a wheelhouse that they are in
STAGES = (*("sources", "series", "kernels", "wheels", "wheelhouse", "packs", "image", "smoke"),)
PLANNED = STAGES[STAGES.index("image") - 1]
"""The last stage that a machine can plan for a target of another platform."""
UNPATCHED = "unpatched"
PLUGIN = "plugin"
"""The label of our plugin's wheel."""


@dataclass(frozen=True)
class Context(Project):
    """A target of a checkout, for one platform, and the choices that change its wheels."""

    target_name: str
    target: Target
    platform: Platform
    source: SourcePlan
    """Of all upstreams but those with a mirror, which is git's."""
    wheels: str = "overlay"
    """``overlay`` or ``compile``."""
    pack: tuple[str, ...] = ()
    """FlashInfer's modules that are compiled ahead of time: as ``Target.pack``."""
    _series: dict[str, Series] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, project: Project, name: str, platform: Platform) -> Context:
        """Return a target as pins.yaml describes it; PinsError if it has no such target."""
        target = project.pins.target(name)
        of = (project.pins_path, project.pins, project.store, project.access)
        return cls(*of, name, target, platform, target.source, pack=target.pack)

    @property
    def epoch(self) -> int:
        """Date of every file that is written, seconds since 1970."""
        return self.pins.release.source_date_epoch

    @property
    def serve(self) -> tuple[str, ...]:
        """Options of ``vllm serve`` for a virtual environment: the profile's, then the target's."""
        return self.serve_with(self.serving)

    def serve_with(self, profile: Profile) -> tuple[str, ...]:
        """Return the same with another profile; of memory it names the most that it allows."""
        return (*profile.options(most_memory=True), *self.target.serve)

    @property
    def serving(self) -> Profile:
        """The target's profile, as an image has it."""
        return self.pins.profile_of(self.target)

    @property
    def release(self) -> str:
        """See ``release_name``."""
        return release_name(self.pins, self.target)

    @property
    def dist(self) -> Path:
        """The folder of published results."""
        return self.root / "dist" / self.target_name

    @property
    def lock(self) -> Path:
        """The hash-locked requirements of the other wheels."""
        return self.root / self.target.requirements[self.platform]

    def layers(self, wheel: str) -> tuple[str, ...]:
        """Return the upstreams whose series go onto a wheel: its own, and those it carries."""
        return (wheel, *self.target.wheels[wheel].carries)

    def release_file(self, wheel: str) -> ReleaseFile:
        """Return the release wheel that the target installs of an upstream, or changes."""
        key = self.target.wheels[wheel].files[self.platform]
        return self.pins.upstream(wheel).files[key]

    def upstream(self, name: str) -> Upstream:
        """Return an upstream; its source file, if a wheel, is the one that the target installs."""
        upstream = self.pins.upstream(name)
        source = upstream.files.get(upstream.source_file or "")
        if source is None or not source.is_wheel:
            return upstream
        holder = next(wheel for wheel in self.target.wheels if name in self.layers(wheel))
        # Python files are the same in all platforms' wheels, as the recorded tree proves
        key = self.target.wheels[holder].files[self.platform]
        files = {**upstream.files, key: self.release_file(holder)}
        return upstream.model_copy(update={"source_file": key, "files": files})

    def series_of(self, upstream: str) -> Series:
        """Return an upstream's series, read once for a build; raises what ``series.read`` does."""
        if upstream not in self._series:
            self._series[upstream] = series.read(self.series_folder(upstream))
        return self._series[upstream]


@dataclass(frozen=True)
class Tools:
    """The means to make images and compiled code, and to serve what a build made.

    Without an engine that is a virtual environment.
    """

    engine: Engine | None = None
    base: BaseImage | None = None
    """Of the image, and of the one that wheels are compiled in; None where neither is made."""
    ca_bundle: Path | None = None
    jobs: int | None = None
    """Compilers at once; None: as many as memory holds."""
    cold: bool = False
    """The image is built without the engine's cache, into a file and not into the engine."""
    port: int = 0
    ready_timeout_s: float = 300.0
    arguments: tuple[str, ...] = ()
    """The user's options of ``vllm serve`` for one run, after the target's own."""


def width(gib: float) -> int:
    """Return the number of jobs that CPUs and memory allow at once; 4 GiB of it stay free."""
    room = memory.read().room / memory.GIB - 4
    return max(1, min(len(os.sched_getaffinity(0)), int(room / gib)))


def release_name(pins: Pins, target: Target) -> str:
    """Return the name of a target's build: its first wheel's version, and our counter."""
    first = pins.upstream(next(iter(target.wheels)))
    return f"{first.version}-spark.{pins.release.counter}"
