"""Containers that runs of ours started: each says whose it is, so that a later run can end it."""

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
    """Return what this process labels its containers with."""
    return f"{_here()} {os.getpid()}"


def sweep(engine: Engine) -> None:
    """Remove the containers of runs that were killed before they could."""
    for container in engine.client.containers.list(all=True, filters={"label": LABEL}):
        where, _, pid = container.labels[LABEL].rpartition(" ")
        # a process number means something only where it was given
        if where == _here() and not _alive(int(pid)):
            end(container)


def end(container: Container) -> None:
    """Kill a container and remove it; returns when its name is free.

    One that was started with ``--rm`` the engine removes itself as soon as it is killed: whoever of
    the two comes second is refused (409), or finds nothing (404).
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
    """Tell whether a process of this number is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
