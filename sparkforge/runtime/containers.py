"""Containers of sparkforge: a label names their process, so that a later run can remove them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sparkforge.runtime.engine import Engine

LABEL = "org.sparkforge.maker"


def mark() -> str:
    """Return the label of this process' containers."""
    return f"{_here()} {os.getpid()}"


def sweep(engine: Engine) -> None:
    """Remove the containers of runs that were killed before they could."""
    from docker.errors import APIError

    for container in engine.client.containers.list(all=True, filters={"label": LABEL}):
        where, _, pid = container.labels[LABEL].rpartition(" ")
        # a process number is only valid on its own machine
        if where == _here() and not Path("/proc", pid).exists():
            with suppress(APIError):  # another run is faster
                container.remove(force=True, v=True)


def _here() -> str:
    """Name this boot of this machine and its space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
