"""What an image's build does beside installing wheels: it compiles Triton's module, and checks.

    image_build.py triton WHEELS WHEELHOUSE OUT
    image_build.py needs FILE    JSON: a list of {"program", "file", "library" or "module": …,
                                 "package": …}, and of {"absent": PROGRAM}

The Dockerfile runs this file alone. Triton would compile one C file at the start of each server
whose cache lacks the result; ``seed`` puts the image's there.
"""

import base64
import ctypes
import faulthandler
import hashlib
import importlib
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

CUDA = "/usr/local/cuda/bin"  # FlashInfer looks for nvcc there, too
NAME = "triton"  # the module's folder in the image's share folder
LIBRARY_VARIABLE = "TRITON_LIBCUDA_PATH"  # the driver's folder, for a compiler; part of the key
_BACKEND, _SOURCE = "triton/backends/nvidia", "driver.c"
_KINDS: Mapping[str, Callable[[str], object]] = {
    "program": shutil.which,
    "file": os.path.isfile,
    "library": ctypes.CDLL,
    "module": importlib.import_module,
}


def missing(needs: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a line for each thing that is wrong. Imports come last, since they take seconds."""
    lines, excluded = [], []
    for need in sorted(needs, key=lambda need: "module" in need):
        if "absent" in need:
            program = shutil.which(need["absent"], path=f"{os.environ['PATH']}:{CUDA}")
            excluded += [program] if program else []
            continue
        (kind,) = need.keys() - {"package"}
        try:
            there, reason = _KINDS[kind](need[kind]), ""
        except Exception as error:  # a server would meet the same
            there, reason = None, f": {type(error).__name__}: {error}".splitlines()[0][:200]
        if not there:
            what = "cannot import" if kind == "module" else f"lacks the {kind}"
            lines.append(f"the image {what} {need[kind]}, of the package {need['package']}{reason}")
    if excluded:
        lines.append(f"the image has {', '.join(excluded)}, which the target excludes")
    return lines


def triton(wheels: Path, wheelhouse: Path, out: Path) -> None:
    """Compile the module of the image's Triton into a new folder, if its target has a GPU.

    Names of folders are not in the result: the compiler runs in the source's, and strips.
    """
    profile = wheels / "share" / "profile.json"
    found = [*wheels.glob("triton-*.whl"), *wheelhouse.glob("triton-*.whl")]  # ours has priority
    has_gpu = profile.exists() and json.loads(profile.read_bytes()).get("cuda_arch") is not None
    if not (has_gpu and found):
        return
    made = out.absolute() / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    made.parent.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(found[0]) as archive:
        wanted = (f"{_BACKEND}/{_SOURCE}", f"{_BACKEND}/include/")
        archive.extractall(folder, [one for one in archive.namelist() if one.startswith(wanted)])
        # names the driver's library as one that the module needs, which has the functions
        driver = Path(folder, "libcuda.so.1")
        empty = ("-shared", "-nostdlib", f"-Wl,-soname,{driver.name}", "-xc", os.devnull)
        # of Python; Debian's own default scheme names another folder
        headers = sysconfig.get_path("include", "posix_prefix")
        options = ("-O3", "-shared", "-fPIC", "-Wno-psabi", "-s", "-Iinclude", f"-I{headers}")
        # Ubuntu's gcc leaves libraries out whose functions are not used
        library = ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{driver.name}")
        try:
            subprocess.run(["gcc", *empty, "-o", str(driver)], check=True)
            command = ["gcc", *options, _SOURCE, *library, "-o", str(made)]
            subprocess.run(command, cwd=Path(folder, _BACKEND), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
            sys.exit(f"the image lacks what Triton's module needs, of gcc or {python}: {error}")


def triton_key(backend: Path, libcuda: str) -> str:
    """Return the name of the module's folder in Triton's cache, as triton.runtime makes it."""
    machine = ",".join([platform.machine(), platform.system(), *platform.architecture()])
    text = f"{machine}languagec:library_dirs{backend}/lib:{libcuda}:include_dirs{backend}/include:"
    text += "librarieslibcuda.so.1:"
    digest = hashlib.sha256((backend / _SOURCE).read_bytes() + text.encode()).digest()
    return base64.b32encode(digest).decode().rstrip("=")


def seed(share: Path, variables: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Copy the image's module into a server's cache, unless that has one."""
    spec = importlib.util.find_spec("triton")
    modules = list((share / NAME).glob("*.so"))
    if spec is None or spec.origin is None or not modules:
        return {}
    backend = Path(os.path.realpath(Path(spec.origin).parent / "backends" / "nvidia"))
    libcuda = variables.get(LIBRARY_VARIABLE) or str(share / NAME)
    path = Path(variables["TRITON_CACHE_DIR"], triton_key(backend, libcuda), modules[0].name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(modules[0], path)
        say("Triton's module for the driver: the image's is used")
    return {LIBRARY_VARIABLE: libcuda}


if __name__ == "__main__":
    if sys.argv[1] == "triton":
        triton(*map(Path, sys.argv[2:]))
    else:
        faulthandler.enable()  # shows where an import ends by a signal
        sys.exit("\n".join(missing(json.loads(Path(sys.argv[2]).read_text("utf-8")))) or 0)
