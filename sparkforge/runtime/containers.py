"""Containers of sparkforge: a label names their process, so that a later run can remove them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from sparkforge.runtime.engine import Engine

if TYPE_CHECKING:
    from docker.models.containers import Container

LABEL = "org.sparkforge.maker"
_REMOVED_S = 60


def mark() -> str:
    """Return the label of this process' containers."""
    return f"{_here()} {os.getpid()}"


def sweep(engine: Engine) -> None:
    """Remove the containers of runs that were killed before they could."""
    for container in engine.client.containers.list(all=True, filters={"label": LABEL}):
        where, _, pid = container.labels[LABEL].rpartition(" ")
        # a process number is only valid on its own machine
        if where == _here() and not _alive(int(pid)):
            end(container)


def end(container: Container) -> None:
    """Kill a container and remove it; returns when its name is free.

    The engine itself removes one that was started with ``--rm`` after its kill. The second of the
    two removals fails with 409 or 404.
    """
    from docker.errors import APIError, NotFound

    try:
        container.remove(force=True, v=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != requests.codes.conflict:
            raise
    try:
        container.wait(condition="removed", timeout=_REMOVED_S)
    except NotFound:
        pass


def _here() -> str:
    """Name this boot of this machine and its space of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _alive(pid: int) -> bool:
    """Return whether a process with this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
