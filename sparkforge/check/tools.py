"""Programs of others that checks run, from hash-locked wheels in environments of their own."""

import sys
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import host_platform
from sparkforge.build.stages import thirdparty
from sparkforge.core.disk import sha256_file
from sparkforge.core.run import call
from sparkforge.runtime import environment
from sparkforge.sources import wheelhouse
from sparkforge.sources.project import Project
from sparkforge.store.store import code_of


@dataclass(frozen=True)
class _Installed:
    """Result of an environment: NAME==VERSION of its tool."""

    requirement: str


def install(project: Project, lock: Path, tool: str) -> tuple[Path, str]:
    """Return the environment of a lock's wheels, and a tool's version; made if the store lacks it.

    FetchError: a wheel is in neither store nor index.
    """
    store, here = project.store, host_platform()
    (locked,) = (line for line in wheelhouse.read_lock(lock) if line.name == tool)
    inputs = {"lock": sha256_file(lock), "platform": here, "python": sys.version}
    inputs["code"] = code_of(__name__)

    def make(folder: Path) -> _Installed:
        wheels, venv, uv = folder / "wheels", folder / "venv", environment.uv_program()
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        wanted = wheelhouse.Wanted(lock, (), minor, here, None)
        thirdparty.fill(project, wanted, wheels)
        alone = {"UV_NO_CONFIG": "1", "VIRTUAL_ENV": "", "UV_LINK_MODE": "copy"}
        quietly = ("--quiet", "--no-cache")
        call(uv, "venv", *quietly, "--relocatable", "--python", sys.executable, venv, env=alone)
        words = ("--offline", "--no-index", "--no-deps", "--require-hashes", "-r", lock)
        into = ("--python", venv / "bin" / "python", "--find-links", wheels)
        call(uv, "pip", "install", *quietly, *into, *words, env=alone)
        return _Installed(locked.requirement)

    made = store.build("tools", inputs, _Installed, make)
    store.remember("tools", f"{tool} {here}", made)  # else `clean --superseded` would remove it
    return made.path / "venv", locked.version
