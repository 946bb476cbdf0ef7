"""nvcc from locked wheels, the machine's C++ compiler for host code, and empty libraries."""

from __future__ import annotations

import platform
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import CommandError, CompileError, MachineError
from sparkforge.core.hashing import code_digest, sha256_file
from sparkforge.core.run import call
from sparkforge.pins.types import MACHINES, Platform

_MEMBER = re.compile(r"(nvidia/cu13/(?P<cuda>(bin|include|nvvm)/.+)|(?P<ffi>tvm_ffi/include/.+))")
CUBLAS = Path(__file__).with_name("include")
"""Stand-ins for cuBLAS's headers."""
_SAME_PLACE = Path(__file__).with_name("same_place.sh")
_TOLD_THE_PATH = ("bin/cudafe++", "nvvm/bin/cicc")
_PREFIX = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
_DEBIAN = {"linux/amd64": "x86-64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
_STUBS = {"cudart": "libcudart.so.13", "cuda": "libcuda.so.1", "nvrtc": "libnvrtc.so.13"}
NEWEST = {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15)}
"""Versions of symbols that the image has: Ubuntu 24.04, as the locks assume (scripts/lock.sh)."""

MISSING = "none on this machine"
"""In place of a compiler's identity, in a plan."""


@dataclass(frozen=True)
class Host:
    """The C++ compiler for a platform's host code.

    Attributes:
        program: its name.
        identity: for keys: its version, its target and its C library.
    """

    program: str
    identity: str


def host(wanted: Platform) -> Host:
    """Return the compiler for a platform: this machine's own, or the cross compiler.

    Raises:
        MachineError: it is missing.
    """
    here = MACHINES.get(platform.machine())
    program = "g++" if here == wanted else f"{_PREFIX[wanted]}-g++"
    package = "g++" if here == wanted else f"g++-{_DEBIAN[wanted]}"
    try:
        version = call(program, "--version").stdout.decode().splitlines()[0]
        macros = call(program, "-dM", "-E", "-include", "features.h", "-xc++", "/dev/null").stdout
        target = call(program, "-dumpmachine").stdout.decode().strip()
    except (MachineError, CommandError) as error:
        msg = f"{program} is missing, which compiles the host code of FlashInfer's modules"
        raise MachineError(msg, f"sudo apt-get install {package}") from error
    libc = dict(re.findall(r"#define __GLIBC(_MINOR)?__ (\d+)", macros.decode()))
    return Host(program, f"{version}, {target}, glibc {libc.get('')}.{libc.get('_MINOR')}")


def found(wanted: Platform) -> Host | None:
    """Return the compiler for a platform; None: it is missing."""
    try:
        return host(wanted)
    except MachineError:
        return None


def identity(lock: Path) -> str:
    """Return what tells nvcc, with what we put beside it, from others.

    Args:
        lock: of its wheels.
    """
    return f"{sha256_file(lock)} {code_digest(_SAME_PLACE, *CUBLAS.glob('*.h'))}"


def unpack(wheels: Path, folder: Path) -> None:
    """Write nvcc into ``cuda`` and tvm-ffi's headers into ``tvm_ffi`` of a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                match = _MEMBER.fullmatch(member)
                if match is None or member.endswith("/"):
                    continue
                cuda = match["cuda"]
                path = folder / (f"cuda/{cuda}" if cuda else match["ffi"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
                if cuda and "bin/" in cuda:
                    path.chmod(0o755)
    for name in _TOLD_THE_PATH:
        program = folder / "cuda" / name
        program.rename(program.with_name(f"{program.name}.real"))
        shutil.copy(_SAME_PLACE, program)
        program.chmod(0o755)
    for header in CUBLAS.glob("*.h"):
        (folder / "cuda" / "include" / header.name).write_bytes(header.read_bytes())


def stubs(compiler: Host, folder: Path) -> None:
    """Write libraries without functions, which modules name as those that they need.

    A module's own functions are looked up when it is loaded: by then torch has loaded libcudart
    and libnvrtc, and the driver has libcuda.
    """
    folder.mkdir()
    for name, soname in _STUBS.items():
        out = folder / f"lib{name}.so"
        linked = ("-shared", "-nostdlib", f"-Wl,-soname,{soname}")
        call(compiler.program, *linked, "-xc++", "/dev/null", "-o", out)


def check_versions(library: Path) -> None:
    """Check that the image's C and C++ libraries have what a module needs of them.

    Raises:
        CompileError: this machine's are newer.
    """
    text = call("readelf", "--version-info", "--wide", library).stdout.decode()
    for kind, version in sorted(set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text))):
        if tuple(int(part) for part in version.split(".")) > NEWEST[kind]:
            msg = f"{library.name} needs {kind}_{version}, which the image lacks"
            raise CompileError(msg, "compile on Debian 12, Ubuntu 24.04 or older")
