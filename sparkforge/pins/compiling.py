"""The parts of pins.yaml about compiling: an upstream's native files, and our own kernels."""

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
    """The CMake target and install component that builds it."""
    device: Device
    """Configuration of the upstream's CMake. ``empty``: neither GPU nor CPU kernels, so that it
    reads none of the upstream's ``externals``."""
    sources: tuple[Place, ...] = ()
    """Its sources in the repository: files, or folders with a trailing slash. Empty: they are
    outside the repository, so no patch can change it."""
    besides: tuple[Place, ...] = ()
    """Files and folders below ``sources`` that are not its sources."""
    blocked: str | None = None
    """Reason why the pinned inputs are not enough to compile it."""

    def made_from(self, path: str) -> bool:
        """Return whether a file of the repository is one of its sources."""
        return below(path, self.sources) and not below(path, self.besides)


class Compile(Model):
    """Settings for compiling wheels of an upstream."""

    blocked: str | None = None
    """Reason why they can't be compiled: they are overlaid."""
    variables: Mapping[Variable, str] = Field(default_factory=dict)
    """Environment of the wheel's build."""
    configure: tuple[CMakeWord, ...] = ()
    """Arguments for CMake; ``{device}`` stands for a native's device."""
    natives: tuple[Native, ...] = ()
    from_release: tuple[Place, ...] = ()
    """Files and folders of the wheel that no build of ours makes."""
    redirect: Variable | None = None
    """Variable with the folder of this upstream's patched files (the first of ``paths``), for the
    build of a wheel that carries it."""
    supplement: tuple[Place, ...] = ()
    """Files and folders of the source file that the git commit lacks: submodules, and files that
    upstream's release job wrote."""


class Plugin(Model):
    """Our plugin for vLLM: its folder, and what the stage ``kernels`` compiles of it."""

    folder: Place
    """In the checkout: ``pyproject.toml``, ``csrc/`` and the Python package."""
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    requirements: FilePath
    """Hash-locked requirements of the compiler, relative to pins.yaml."""
    spills: tuple[Name, ...] = ()
    """Kernels that may keep registers in memory; others may not."""

    @property
    def source(self) -> str:
        """The file to compile; it includes files of its folder only."""
        return f"{self.folder}csrc/kernels.cu"


def below(path: str, places: tuple[str, ...]) -> bool:
    """Return whether a path is one of some files, or lies in one of some folders (``NAME/``)."""
    return any(path == p or (p.endswith("/") and path.startswith(p)) for p in places)
