"""Containers that runs of ours started: each says whose it is, so that a later run can end it."""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.engine import Engine
from sparkforge.run import alive

LABEL = "org.sparkforge.maker"


def mark() -> str:
    """Return what this process labels its containers with."""
    return f"{_here()} {os.getpid()}"


def sweep(engine: Engine) -> None:
    """Remove the containers of runs that were killed before they could."""
    for container in engine.client.containers.list(all=True, filters={"label": LABEL}):
        where, _, pid = container.labels[LABEL].rpartition(" ")
        # a process number means something only where it was given
        if where == _here() and not alive(int(pid)):
            container.remove(force=True, v=True)


def _here() -> str:
    """Name this boot of this machine and its space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
