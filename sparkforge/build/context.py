"""What the stages share: one build's context, and the items that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.core.errors import StoreError
from sparkforge.core.hashing import intact, key_of
from sparkforge.pins.pins import Pins, ReleaseFile, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import series
from sparkforge.series.series import Series
from sparkforge.serving.document import Document
from sparkforge.serving.profile import Profile
from sparkforge.sources.download import Fetches
from sparkforge.sources.sources import Access, Source
from sparkforge.store.artefact import Artefact
from sparkforge.store.store import Store

if TYPE_CHECKING:
    from sparkforge.runtime.engine import BaseImage, Engine

WHEELS = "wheels"  # the folder of a wheelhouse that they are in
STAGES = ("sources", "series", "builder", "wheels", "wheelhouse", "image", "smoke")
UNPATCHED = "unpatched"


@dataclass(frozen=True)
class Context:
    """One build: what was asked for, and the means to do it.

    Attributes:
        root: the checkout; ``patches/``, ``requirements/`` and ``Dockerfile`` lie in it.
        engine: container engine that bakes an image; None bakes a plain environment.
        base: of the image, and of the one that wheels are compiled in; None where neither is made.
        builder: buildx's name of what bakes the image.
        offline: ask no network.
        force: stages that run again although the store has their result.
        arguments: of ``vllm serve``, behind the target's own; the user's, for one run.
        wheels: ``overlay`` or ``compile``: how they are made.
        native: with ``compile``: ``patched`` natives or ``all`` of them.
        jobs: compilers at once; None: as many as memory holds.
        cold: the image is built without the engine's cache, into a file and not into the engine.
    """

    root: Path
    pins: Pins
    pins_path: Path
    store: Store
    target_name: str
    target: Target
    platform: Platform
    access: Access
    engine: Engine | None = None
    base: BaseImage | None = None
    builder: str = "default"
    ca_bundle: Path | None = None
    port: int = 0
    ready_timeout_s: float = 300.0
    force: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    cold: bool = False
    wheels: str = "overlay"
    native: str = "patched"
    jobs: int | None = None

    @property
    def epoch(self) -> int:
        """Date of every file that is written, seconds since 1970."""
        return self.pins.release.source_date_epoch

    @property
    def serve(self) -> tuple[str, ...]:
        """Options of ``vllm serve`` for a plain environment: the profile's, then the target's.

        Of memory it names the most that the profile allows; an image holds the profile itself, and
        works out what the machine has available.
        """
        profile = Profile.of(Document(self.target_name, self.profile))
        return (*profile.options(most_memory=True), *self.target.serve)

    @property
    def profile(self) -> dict[str, Any]:
        """The target's profile, as an image gets it."""
        return self.pins.profile_of(self.target)

    @property
    def release(self) -> str:
        """What the result is called: see ``release_name``."""
        return release_name(self.pins, self.target)

    @property
    def server_log(self) -> Path:
        """Where the output of a server is kept that did not start, or is being served."""
        return self.root / "dist" / self.target_name / "server.log"

    @property
    def lock(self) -> Path:
        """The hash-locked requirements of what is installed beside our wheels."""
        return self.root / self.target.requirements[self.platform]

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
        """Read an upstream's series; raises what ``series.read`` does."""
        return series.read(self.root / "patches" / upstream)


def release_name(pins: Pins, target: Target) -> str:
    """Return what a target's build is called: its first wheel's version, and our counter."""
    first = pins.upstream(next(iter(target.wheels)))
    return f"{first.version}-spark.{pins.release.counter}"


Results = Mapping[str, Artefact]
Make = Callable[[Path, Results], Mapping[str, Any]]


@dataclass(frozen=True)
class Item:
    """One thing to make.

    Attributes:
        stage: one of ``STAGES``.
        label: unique in a build, e.g. ``wheel vllm``.
        inputs: everything that determines the result, as JSON values.
        make: fills a folder and returns the outputs; earlier results come by label.
        valid: whether a result in the store still stands: its other half may be gone, or it is
            damaged.
        sound: the same where that takes seconds; asked before something is made of the result.
        download: release files that it may have to fetch.
        fetches: what else it may have to fetch.
        commands: for people: the command lines that it runs, where those are worth reading.
        kept: ``--force`` of its stage does not make it again: the stage needs it, and it is not the
            stage's result.
    """

    stage: str
    label: str
    inputs: Mapping[str, Any]
    make: Make
    valid: Callable[[Artefact], bool] = field(default=lambda artefact: True)
    sound: Callable[[Artefact], bool] = field(default=lambda artefact: True)
    download: tuple[ReleaseFile, ...] = ()
    commands: tuple[str, ...] = ()
    fetches: Callable[[], Fetches] = field(default=Fetches)
    kept: bool = False

    @property
    def key(self) -> str:
        """sha256 of the inputs: what the store finds the result by."""
        return key_of(self.inputs)


def source_of(store: Store, name: str, artefact: Artefact) -> Source:
    """Return the source that a ``source`` artefact stands for."""
    out = artefact.outputs
    return Source(
        name, out["provider"], store.git_path(name), out["commit"], out["tree"], out["origin"]
    )


def holds_wheel(artefact: Artefact) -> bool:
    """Tell whether the wheel that an artefact holds is still the one that was made."""
    path = artefact.path / str(artefact.outputs["file"])
    return intact(path, str(artefact.outputs["sha256"]))


def wheels_of(items: Sequence[Item], results: Results) -> dict[Path, str]:
    """Return the wheels that items gave, each with its recorded sha256; raises ``wheel_path``'s."""
    made = [results[item.label] for item in items]
    return {wheel_path(one): str(one.outputs["sha256"]) for one in made}


def wheel_path(artefact: Artefact) -> Path:
    """Return the wheel that a ``wheel`` artefact holds, read again for this.

    Raises:
        StoreError: it is gone, or damaged.
    """
    path = artefact.path / str(artefact.outputs["file"])
    if not holds_wheel(artefact):
        msg = f"{path}: missing or damaged in the store"
        raise StoreError(msg, "run the build again: it rebuilds the wheel")
    return path
