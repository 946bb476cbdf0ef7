"""What pins.yaml says of compiling an upstream: its native files, and kernels of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from sparkforge.pins.types import (
    CMakeTarget,
    CMakeWord,
    FilePath,
    GpuCode,
    Model,
    Name,
    Place,
    Variable,
)

Device = Literal["empty", "cpu", "cuda"]


class Native(Model):
    """One native file of the release wheel."""

    file: FilePath
    """Path in the wheel."""
    target: CMakeTarget
    """The CMake target, and install component, that makes it."""
    device: Device
    """What the upstream's CMake is configured for. ``empty``: neither GPU nor CPU kernels, so that
    it reads none of the upstream's ``externals``."""
    sources: tuple[Place, ...] = ()
    """Files, or folders with a trailing slash, of the repository that it is made from. None: its
    sources lie outside of the repository, so no patch can change it."""
    besides: tuple[Place, ...] = ()
    """Files and folders below ``sources`` that it is not made from."""
    blocked: str | None = None
    """Why it can't be compiled from what pins.yaml pins."""

    def made_from(self, path: str) -> bool:
        """Return whether a file of the repository goes into it."""
        return below(path, self.sources) and not below(path, self.besides)


class Compile(Model):
    """How wheels of an upstream are compiled."""

    blocked: str | None = None
    """Why they can't be: its wheels are overlaid, and ``--native all`` is refused."""
    variables: Mapping[Variable, str] = Field(default_factory=dict)
    """Environment of the wheel's build."""
    variables_all: Mapping[Variable, str] = Field(default_factory=dict)
    """The same with ``--native all``, over ``variables``."""
    configure: tuple[CMakeWord, ...] = ()
    """Words for CMake; ``{device}`` stands for a native's device."""
    natives: tuple[Native, ...] = ()
    from_release: tuple[Place, ...] = ()
    """Files and folders of the wheel that a build without natives does not make."""
    always_release: tuple[Place, ...] = ()
    """Those that no build of ours makes, with ``--native all`` either."""
    redirect: Variable | None = None
    """Variable that points the build of a wheel that carries this upstream at its patched files:
    those of the first folder among ``paths``."""
    supplement: tuple[Place, ...] = ()
    """Files and folders that the source file has and the git commit lacks: submodules, and what
    upstream's release job wrote."""


class Kernels(Model):
    """CUDA sources of the series that the stage ``kernels`` compiles, for every kind of wheel."""

    source: FilePath
    """The file of the repository that is compiled; it includes files of its folder only. A series
    without it has no kernels."""
    wheel: Place
    """Folder of the wheel that the machine code and its manifest lie in."""
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    requirements: FilePath
    """Hash-locked requirements of the compiler, relative to pins.yaml."""
    spills: tuple[Name, ...] = ()
    """Kernels that may keep registers in memory; others may not."""

    @property
    def folder(self) -> str:
        """Folder of ``source``, with its trailing slash; all files in it are sources."""
        return f"{self.source.rpartition('/')[0]}/"


def below(path: str, places: tuple[str, ...]) -> bool:
    """Return whether a path is one of some files, or lies in one of some folders (``NAME/``)."""
    return any(path == p or (p.endswith("/") and path.startswith(p)) for p in places)
