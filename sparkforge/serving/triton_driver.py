"""Triton's module for the CUDA driver, compiled with the image, not on the user's machine.

    triton_driver.py WHEELS WHEELHOUSE OUT

Triton 3.7 compiles one C file with the machine's compiler, at the start of each server whose cache
lacks the result. The Dockerfile runs this file alone, so it imports no other module of sparkforge.
It does nothing for a target without a GPU, or without Triton. The result is not loaded: there is no
driver during the build. ``seed`` puts it into a server's cache.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

NAME = "triton"
"""Of the image's share folder: a folder with the name that Triton's cache gives it, and a file."""
_BACKEND = "triton/backends/nvidia"
_SOURCE = "driver.c"


# -- at the end of the image's build ---------------------------------------------------------------


def build(backend: Path, out: Path) -> Path:
    """Compile the module; returns its path below ``out``, which is that in Triton's cache.

    Names of folders are not in the result: the compiler runs in the source's, and strips.

    Args:
        backend: Triton's folder for NVIDIA's GPUs, with ``driver.c`` and ``include/cuda.h``.

    Raises:
        OSError: there is no gcc, or a file is missing.
        subprocess.CalledProcessError: gcc failed, and has printed the reason.
    """
    # As in triton.runtime.build and .cache. architecture() calls the program `file`, and has no
    # linkage without it: where this runs, it has to be there or missing as in the image.
    platform_key = ",".join([platform.machine(), platform.system(), *platform.architecture()])
    text = (backend / _SOURCE).read_text(encoding="utf-8")
    digest = hashlib.sha256((text + platform_key).encode()).digest()
    key = base64.b32encode(digest).decode().rstrip("=")
    made = out.absolute() / key / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    made.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        # names the driver's library as one that the module needs, which has the functions
        driver = Path(folder, "libcuda.so.1")
        empty = ("-shared", "-nostdlib", f"-Wl,-soname,{driver.name}", "-xc", os.devnull)
        subprocess.run(["gcc", *empty, "-o", str(driver)], check=True)
        options = ("-O3", "-shared", "-fPIC", "-Wno-psabi", "-s", "-Iinclude", f"-I{_headers()}")
        # Ubuntu's gcc leaves libraries out whose functions are not used
        library = ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{driver.name}")
        command = ["gcc", *options, _SOURCE, *library, "-o", str(made)]
        subprocess.run(command, cwd=backend, check=True)
    return made


def _headers() -> Path:
    """Return the folder of Python's C headers; Debian's own default scheme names another."""
    return Path(sysconfig.get_path("include", "posix_prefix"))


def _unpack(wheel: Path, folder: Path) -> Path:
    """Write the source to compile; returns its folder."""
    wanted = (f"{_BACKEND}/{_SOURCE}", f"{_BACKEND}/include/")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    return folder / _BACKEND


def main(wheels: Path, wheelhouse: Path, out: Path) -> None:
    """Compile the module of the image's Triton, if its target has a GPU.

    Args:
        wheels: ours, and the image's share folder.
        wheelhouse: all others.
    """
    profile = wheels / "share" / "profile.json"
    if not profile.exists() or json.loads(profile.read_bytes()).get("cuda_arch") is None:
        return
    found = [*wheels.glob("triton-*.whl"), *wheelhouse.glob("triton-*.whl")]  # ours has priority
    if not found:
        return
    # worded as in needs.py, which checks later
    if shutil.which("gcc") is None:
        sys.exit("the image lacks the program gcc, of the package gcc")
    if not (header := _headers() / "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        sys.exit(f"the image lacks the file {header}, of the package {package}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(_unpack(found[0], Path(folder)), out)
        except subprocess.CalledProcessError as error:
            sys.exit(f"Triton's {_SOURCE} does not compile: gcc's exit code is {error.returncode}")


# -- at a server's start -------------------------------------------------------------------------


def cache(variables: Mapping[str, str]) -> Path:
    """Return the folder of Triton's cache, as Triton chooses it."""
    if chosen := variables.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    home = variables.get("TRITON_HOME") or variables.get("HOME") or Path.home()
    return Path(home, ".triton", "cache")


def seed(share: Path, variables: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Copy the image's module into a server's cache, unless that has one.

    A failure is no error: Triton then compiles it as it would without the image's.

    Args:
        share: the image's folder of data.
        variables: the server's.
    """
    folder = cache(variables)
    for module in sorted((share / NAME).glob("*/*.so")):
        path = folder / module.parent.name / module.name
        try:
            if not path.exists():
                _copy(module, path)
                say("Triton's module for the driver: the image's is used")
        except OSError as error:
            say(
                f"warning: Triton's module for the driver cannot be copied into {folder}: {error};"
                " Triton compiles it, which needs gcc"
            )


def _copy(module: Path, path: Path) -> None:
    """Copy at once: another server may look meanwhile, or this one be killed."""
    data = module.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, passing = tempfile.mkstemp(".tmp", "sparkforge-", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, 0o644)
        Path(passing).replace(path)
    except OSError:
        Path(passing).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
