"""Triton's module for the CUDA driver, compiled with the image, not on the user's machine.

    triton_driver.py WHEELS WHEELHOUSE OUT

Triton compiles one C file with the machine's compiler, at the start of each server whose cache
lacks the result. The Dockerfile runs this file alone, so it imports no other module of sparkforge.
It does nothing for a target without a GPU, or without Triton. The result is not loaded: there is no
driver during the build. ``seed`` puts it into a server's cache, under the key that Triton 3.8 looks
for: of the source and of folders, which are those of the machine.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
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
"""The module's folder in the image's share folder."""
LIBRARY_VARIABLE = "TRITON_LIBCUDA_PATH"
"""Names Triton the folder of the driver's library, which it would look for; part of the key. Triton
only gives it to a compiler."""
_BACKEND = "triton/backends/nvidia"
_SOURCE = "driver.c"


# -- at the end of the image's build ---------------------------------------------------------------


def build(backend: Path, out: Path) -> Path:
    """Compile the module; returns its path in ``out``.

    Names of folders are not in the result: the compiler runs in the source's, and strips.

    Args:
        backend: Triton's folder for NVIDIA's GPUs, with ``driver.c`` and ``include/cuda.h``.

    Raises:
        OSError: there is no gcc, or a file is missing.
        subprocess.CalledProcessError: gcc failed, and has printed the reason.
    """
    made = out.absolute() / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
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


def installed() -> Path | None:
    """Return Triton's folder for NVIDIA's GPUs as Triton names it, or None."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    return Path(os.path.realpath(Path(spec.origin).parent / "backends" / "nvidia"))


def key(backend: Path, libcuda: str) -> str:
    """Return the name of the module's folder in Triton's cache (triton.runtime.build and .cache).

    Args:
        backend: as ``installed``.
        libcuda: the folder of the driver's library, as the server's variable names it.
    """
    digest = hashlib.sha256((backend / _SOURCE).read_bytes())
    digest.update(
        ",".join([platform.machine(), platform.system(), *platform.architecture()]).encode()
    )
    for name, values in {
        "language": ["c"],
        "library_dirs": [str(backend / "lib"), libcuda],
        "include_dirs": [str(backend / "include")],
        "libraries": ["libcuda.so.1"],
    }.items():
        digest.update(name.encode() + b"".join(value.encode() + b":" for value in values))
    return base64.b32encode(digest.digest()).decode().rstrip("=")


def seed(share: Path, variables: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Copy the image's module into a server's cache, unless that has one.

    A failure is no error: Triton then compiles it as it would without the image's.

    Args:
        share: the image's folder of data.
        variables: the server's.

    Returns:
        What the server's variables need for Triton to find it.
    """
    backend = installed()
    if backend is None:
        return {}
    folder = cache(variables)
    chosen = {LIBRARY_VARIABLE: variables.get(LIBRARY_VARIABLE) or str(share / NAME)}
    found: dict[str, str] = {}
    for module in sorted((share / NAME).glob("*.so")):
        path = folder / key(backend, chosen[LIBRARY_VARIABLE]) / module.name
        try:
            if not path.exists():
                _copy(module, path)
                say("Triton's module for the driver: the image's is used")
            found = chosen
        except OSError as error:
            say(
                f"warning: Triton's module for the driver cannot be copied into {folder}: {error};"
                " Triton compiles it, which needs gcc"
            )
    return found


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
