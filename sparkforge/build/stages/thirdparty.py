"""Folders of a lock's wheels, each with its locked sha256; compilers for GPUs from such wheels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.options import host_platform
from sparkforge.build.results import WheelhouseResult
from sparkforge.core.disk import sha256_file
from sparkforge.core.log import log
from sparkforge.runtime import environment
from sparkforge.sources import sizes
from sparkforge.sources.download import Fetches
from sparkforge.sources.project import Project
from sparkforge.store.store import Artefact

if TYPE_CHECKING:
    from sparkforge.sources.wheelhouse import Wanted

PYTHON = "3.11"
"""Python version for choosing a compiler's wheels, which are for any."""


def _fill(project: Project, wanted: Wanted, into: Path) -> int:
    """Put a lock's wheels into a new folder; returns their number."""
    from sparkforge.sources import wheelhouse  # not needed by a build in which nothing changed

    into.mkdir()
    access, uv = project.access, environment.uv_program()
    known = sizes.read(project.root / sizes.FILE)
    given = (project.store, wanted, access.index, uv)
    return wheelhouse.fill(*given, offline=access.offline, into=into, known=known)


def _fetches(project: Project, wanted: Wanted) -> Fetches:
    from sparkforge.sources import wheelhouse

    return wheelhouse.to_fetch(project.store, wanted, sizes.read(project.root / sizes.FILE))


def wheelhouse_item(
    context: Context, lock: Path | None = None, label: str = "wheelhouse", stage: str = "wheelhouse"
) -> Cached[WheelhouseResult]:
    """Return the folder of a lock's wheels; without a lock: the target's own."""
    lock, target = lock or context.lock, context.target
    driver = context.root / "requirements" / "driver.txt"
    inputs = {
        "lock": sha256_file(lock),
        "driver": sha256_file(driver),
        "python": target.python,
        "platform": context.platform,
    }

    def wanted() -> Wanted:
        from sparkforge.sources import wheelhouse

        # the image's build installs with the uv that the driver is locked to
        tools = tuple(item for item in wheelhouse.read_lock(driver) if item.name == "uv")
        backend = target.torch_backend
        return wheelhouse.Wanted(lock, tools, target.python, context.platform, backend)

    def sound(artefact: Artefact[WheelhouseResult]) -> bool:
        from sparkforge.sources import wheelhouse

        return not wheelhouse.damaged(artefact.path / WHEELS, wanted())

    def make(folder: Path) -> WheelhouseResult:
        count = _fill(context, wanted(), folder / WHEELS)
        log.info(f"{count} third-party wheels (with uv), each with its locked sha256")
        return WheelhouseResult(count)

    return Cached(
        *(stage, label, inputs, WheelhouseResult, make),
        valid=lambda made: len([*(made.path / WHEELS).glob("*.whl")]) == made.result.files,
        sound=sound,
        fetches=lambda: _fetches(context, wanted()),
    )


@dataclass(frozen=True)
class LockedCompiler:
    """A compiler for this machine's processor and all that it needs, each a wheel of a lock."""

    lock: Path
    name: str
    """The lock's name of the compiler, e.g. ``nvidia-cuda-nvcc``."""

    def _wanted(self) -> Wanted:
        from sparkforge.sources import wheelhouse

        return wheelhouse.Wanted(self.lock, (), PYTHON, host_platform(), None)

    def version(self) -> str:
        """Return the compiler's version, e.g. ``13.0.88``; PinsError if the lock is malformed."""
        from sparkforge.sources import wheelhouse

        (found,) = (one for one in wheelhouse.read_lock(self.lock) if one.name == self.name)
        return found.version

    def fill(self, project: Project, into: Path) -> None:
        """Put the wheels into a new folder; UsageError if there are none for this machine."""
        _fill(project, self._wanted(), into)

    def fetches(self, project: Project) -> Fetches:
        """Return the downloads of ``fill``; raises what that does."""
        return _fetches(project, self._wanted())
