"""One build: its target, its options and the means to make it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.pins.pins import Pins, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import series
from sparkforge.series.series import Series
from sparkforge.serving.profile import Profile
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

if TYPE_CHECKING:
    from sparkforge.runtime.engine import BaseImage, Engine
    from sparkforge.sources.project import Project

WHEELS = "wheels"  # the folder of a wheelhouse that they are in
STAGES = (
    *("sources", "series", "kernels", "builder", "wheels", "wheelhouse", "packs", "image", "smoke"),
)
PLANNED = STAGES[STAGES.index("image") - 1]
"""The last stage that a machine can plan for a target of another platform."""
UNPATCHED = "unpatched"
PLUGIN = "plugin"
"""The item of our plugin's wheel."""


@dataclass(frozen=True)
class Context:
    """One build: its options, and the means to make it."""

    root: Path
    """The checkout; ``patches/``, ``requirements/`` and ``Dockerfile`` lie in it."""
    pins: Pins
    pins_path: Path
    store: Store
    target_name: str
    target: Target
    platform: Platform
    access: Access
    engine: Engine | None = None
    """Container engine that builds an image; None makes a virtual environment."""
    base: BaseImage | None = None
    """Of the image, and of the one that wheels are compiled in; None where neither is made."""
    builder: str = "default"
    """buildx's name of its builder."""
    ca_bundle: Path | None = None
    port: int = 0
    ready_timeout_s: float = 300.0
    force: frozenset[str] = frozenset()
    """Stages that run again although the store has their result."""
    arguments: tuple[str, ...] = ()
    """The user's options of ``vllm serve`` for one run, after the target's own."""
    cold: bool = False
    """The image is built without the engine's cache, into a file and not into the engine."""
    wheels: str = "overlay"
    """``overlay`` or ``compile``."""
    jobs: int | None = None
    """Compilers at once; None: as many as memory holds."""
    pack: tuple[str, ...] = ()
    """FlashInfer's modules that are compiled ahead of time: as ``Target.pack``."""
    _series: dict[str, Series] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, project: Project, target_name: str, platform: Platform) -> Context:
        """Return the build of a target without options.

        Raises:
            PinsError: pins.yaml has no such target.
        """
        target = project.pins.target(target_name)
        return cls(
            root=project.root,
            pins=project.pins,
            pins_path=project.pins_path,
            store=project.store,
            target_name=target_name,
            target=target,
            platform=platform,
            access=project.access,
            pack=target.pack,
        )

    @property
    def epoch(self) -> int:
        """Date of every file that is written, seconds since 1970."""
        return self.pins.release.source_date_epoch

    @property
    def serve(self) -> tuple[str, ...]:
        """Options of ``vllm serve`` for a virtual environment: the profile's, then the target's."""
        return self.serve_with(self.serving)

    def serve_with(self, profile: Profile) -> tuple[str, ...]:
        """Return the same with another profile.

        Of memory it names the most that the profile allows; an image holds the profile itself, and
        works out what the machine has available.
        """
        return (*profile.options(most_memory=True), *self.target.serve)

    @property
    def profile(self) -> dict[str, Any]:
        """The target's profile, as an image gets it."""
        return self.pins.profile_of(self.target)

    @property
    def serving(self) -> Profile:
        """The same, as the image reads it."""
        return profile_of(self.pins, self.target_name)

    @property
    def release(self) -> str:
        """Name of the result: see ``release_name``."""
        return release_name(self.pins, self.target)

    @property
    def server_log(self) -> Path:
        """File with the output of a server that did not start, or is being served."""
        return self.root / "dist" / self.target_name / "server.log"

    @property
    def lock(self) -> Path:
        """The hash-locked requirements of the other wheels."""
        return self.root / self.target.requirements[self.platform]

    @property
    def older_natives(self) -> bool:
        """Whether a wheel has the native files of an older release."""
        return any(
            self.pins.upstream(name).files[plan.files[self.platform]].natives is not None
            for name, plan in self.target.wheels.items()
        )

    def layers(self, wheel: str) -> tuple[str, ...]:
        """Return the upstreams whose series go onto a wheel: its own, and those it carries."""
        return (wheel, *self.target.wheels[wheel].carries)

    def upstream(self, name: str) -> Upstream:
        """Return an upstream; its source file, if a wheel, is the one that the target installs.

        Python files are the same in the wheels of all platforms, which the recorded tree proves;
        so nothing is fetched for them alone.
        """
        upstream = self.pins.upstream(name)
        if not upstream.from_wheel:
            return upstream
        holder = next(wheel for wheel in self.target.wheels if name in self.layers(wheel))
        key = self.target.wheels[holder].files[self.platform]
        files = {**upstream.files, key: self.pins.upstream(holder).files[key]}
        return upstream.model_copy(update={"source_file": key, "files": files})

    def series_of(self, upstream: str) -> Series:
        """Return an upstream's series, read once for a build; raises what ``series.read`` does."""
        if upstream not in self._series:
            self._series[upstream] = series.read(self.root / "patches" / upstream)
        return self._series[upstream]


def profile_of(pins: Pins, target_name: str) -> Profile:
    """Return a target's profile as an image reads it; PinsError if there is no such target."""
    return Profile.model_validate(pins.profile_of(pins.target(target_name)))


def release_name(pins: Pins, target: Target) -> str:
    """Return the name of a target's build: its first wheel's version, and our counter."""
    first = pins.upstream(next(iter(target.wheels)))
    return f"{first.version}-spark.{pins.release.counter}"
