"""A compiler for GPUs from the wheels of a lock, for this machine's processor."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import Context
from sparkforge.core.errors import MachineError
from sparkforge.pins.types import MACHINES
from sparkforge.sources import sizes
from sparkforge.sources.download import Fetches

if TYPE_CHECKING:
    from sparkforge.sources.wheelhouse import Wanted

PYTHON = "3.11"
"""Python version for choosing the compiler's wheels, which are for any."""


@dataclass(frozen=True)
class LockedCompiler:
    """A compiler and all that it needs, each a wheel with its sha256."""

    lock: Path
    project: str
    """The lock's name of the compiler, e.g. ``nvidia-cuda-nvcc``."""

    def wanted(self) -> Wanted | None:
        """Return the wheels for this machine; None: there are none."""
        from sparkforge.sources import wheelhouse  # not needed by a build in which nothing changed

        here = MACHINES.get(platform.machine())
        return None if here is None else wheelhouse.Wanted(self.lock, (), PYTHON, here, None)

    def version(self) -> str:
        """Return the compiler's version, e.g. ``13.0.88``.

        Raises:
            PinsError: the lock has no such line, or one that is not locked.
        """
        from sparkforge.sources import wheelhouse

        (version,) = (
            entry.version for entry in wheelhouse.read_lock(self.lock) if entry.name == self.project
        )
        return version

    def fill(self, context: Context, into: Path) -> None:
        """Put the wheels into a new folder.

        Raises:
            MachineError: there are none for this machine.
            FetchError, IntegrityError: as ``wheelhouse.fill``.
        """
        from sparkforge.runtime import interpreter
        from sparkforge.sources import wheelhouse

        wanted = self.wanted()
        if wanted is None:
            msg = f"{self.lock.name} has no compiler for {platform.machine()}"
            raise MachineError(msg, f"build on a machine with {' or '.join(MACHINES)}")
        into.mkdir()
        wheelhouse.fill(
            context.store,
            wanted,
            context.access.index,
            interpreter.uv_program(),
            offline=context.access.offline,
            into=into,
            known=sizes.read(context.root / sizes.FILE),
        )

    def fetches(self, context: Context) -> Fetches:
        """Return the downloads of ``fill``."""
        from sparkforge.sources import wheelhouse

        wanted = self.wanted()
        if wanted is None:
            return Fetches()
        return wheelhouse.to_fetch(context.store, wanted, sizes.read(context.root / sizes.FILE))
