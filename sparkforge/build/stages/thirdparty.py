"""Folders of a lock's wheels, each with its locked sha256; programs of such wheels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.options import host_platform
from sparkforge.build.results import WheelhouseResult
from sparkforge.core.disk import sha256_file
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.runtime import environment
from sparkforge.sources.download import Fetches
from sparkforge.sources.project import Project
from sparkforge.store.store import code_of

# the module wheelhouse is not needed by a build in which nothing changed
if TYPE_CHECKING:
    from sparkforge.sources.wheelhouse import Wanted

PYTHON = "3.11"
"""Python version for choosing a compiler's wheels, which are for any."""


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

    def make(folder: Path) -> WheelhouseResult:
        files = fill(context, wanted(), folder / WHEELS)
        log.info(f"{len(files)} third-party wheels (with uv), each with its locked sha256")
        return WheelhouseResult(files)

    return Cached(
        *(stage, label, inputs, WheelhouseResult, make),
        valid=lambda made: len([*(made.path / WHEELS).glob("*.whl")]) == len(made.result.files),
        fetches=lambda: to_fetch(context, wanted()),
    )


def compiler(lock: Path) -> Wanted:
    """Return a lock's wheels of a compiler that runs here; UsageError if there are none."""
    from sparkforge.sources import wheelhouse

    return wheelhouse.Wanted(lock, (), PYTHON, host_platform(), None)


def version(lock: Path, name: str) -> str:
    """Return the version of a lock's package, e.g. ``13.0.88``; PinsError if it is malformed."""
    from sparkforge.sources import wheelhouse

    return next(one.version for one in wheelhouse.read_lock(lock) if one.name == name)


def fill(project: Project, wanted: Wanted, into: Path) -> dict[str, str]:
    """Put a lock's wheels into a new folder; returns the sha256 of each."""
    from sparkforge.sources import wheelhouse

    into.mkdir()
    given = (project.store, wanted, project.access.index, environment.uv_program())
    return wheelhouse.fill(*given, offline=project.access.offline, into=into)


def to_fetch(project: Project, wanted: Wanted) -> Fetches:
    """Return the downloads of ``fill``."""
    from sparkforge.sources import wheelhouse

    missing = wheelhouse.missing(project.store, wanted)
    return Fetches(unknown=(f"{missing} wheels of {wanted.lock.name}",) if missing else ())


def install(project: Project, lock: Path, tool: str) -> tuple[Path, str]:
    """Return an environment of a lock's wheels, made if the store lacks it, and a tool's version.

    FetchError: a wheel is in neither store nor index.
    """
    from sparkforge.sources import wheelhouse

    here, python = host_platform(), f"{sys.version_info.major}.{sys.version_info.minor}"
    inputs = {"lock": sha256_file(lock), "platform": here, "python": sys.version}
    inputs["code"] = code_of(__name__)

    def make(folder: Path) -> WheelhouseResult:
        wheels, venv, uv = folder / WHEELS, folder / "venv", environment.uv_program()
        files = fill(project, wheelhouse.Wanted(lock, (), python, here, None), wheels)
        alone = {"UV_NO_CONFIG": "1", "VIRTUAL_ENV": "", "UV_LINK_MODE": "copy"}
        quietly = ("--quiet", "--no-cache")
        call(uv, "venv", *quietly, "--relocatable", "--python", sys.executable, venv, env=alone)
        words = ("--offline", "--no-index", "--no-deps", "--require-hashes", "-r", lock)
        into = ("--python", venv / "bin" / "python", "--find-links", wheels)
        call(uv, "pip", "install", *quietly, *into, *words, env=alone)
        return WheelhouseResult(files)

    made = project.store.build("tools", inputs, WheelhouseResult, make)
    # else `clean --superseded` would remove it
    project.store.remember("tools", f"{tool} {here}", made)
    return made.path / "venv", version(lock, tool)
