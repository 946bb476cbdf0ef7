"""What decides the bytes of objects and modules: the compilers' tree, their commands, the linker's.

The code of this module is in the keys of objects, so an edit here compiles all of them again (8 CPU
minutes), and an edit elsewhere none.
"""

import json
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.packs.modules import Module
from sparkforge.core import git
from sparkforge.core.disk import code_digest, key_of, sha256_file
from sparkforge.core.errors import BuildError, CommandError, MachineError
from sparkforge.core.run import call
from sparkforge.pins.types import MACHINES, Platform

READ = ("csrc", "include", "3rdparty")
"""The folders of FlashInfer's sources that compilers read."""
NEWEST = {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15)}
"""Versions of symbols that the image has: Ubuntu 24.04, as the locks assume (scripts/lock.sh)."""
_PREFIX = {"linux/amd64": "x86_64-linux-gnu", "linux/arm64": "aarch64-linux-gnu"}
_DESCRIBE = Path(__file__).with_name("describe.py")
_MEMBERS = (*("nvidia/cu13/bin/", "nvidia/cu13/include/", "nvidia/cu13/nvvm/"), "tvm_ffi/include/")
# stand-ins for cuBLAS's headers
_CUBLAS = Path(__file__).with_name("include")
_SAME_PLACE = Path(__file__).with_name("same_place.sh")
_TOLD_THE_PATH = ("bin/cudafe++", "nvvm/bin/cicc")
_STUBS = {"cudart": "libcudart.so.13", "cuda": "libcuda.so.1", "nvrtc": "libnvrtc.so.13"}
# nvcc's names of its own files are random without these
_NVCC = ("-objtemp", "--frandom-seed=1")
# Ubuntu's linker drops libraries that nothing refers to, Debian's keeps them
_LINK = (
    *("-shared", "-s", "-Wl,--no-as-needed", "-Wl,--build-id=none"),
    *("-Lstubs", "-lcudart", "-lcuda"),
)
# the user's, which would change a result
_FLAGS_OF_OTHERS = dict.fromkeys(
    (
        *("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH"),
        *("LIBRARY_PATH", "LD_RUN_PATH"),
    )
)


@dataclass(frozen=True)
class Host:
    """The C++ compiler for a platform's host code; ``identity``: version, target and C library."""

    program: str
    identity: str


@dataclass(frozen=True)
class Unit:
    """One source and its flags; paths are relative to the tree."""

    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Described:
    """The sources of a module, as FlashInfer compiles it; ``link``: further flags of the linker."""

    name: str
    link: tuple[str, ...]
    units: tuple[Unit, ...]


def digest() -> str:
    """Return one digest of the code that decides the bytes of objects and modules."""
    return code_digest(Path(__file__), _SAME_PLACE, *_CUBLAS.iterdir())


def host(wanted: Platform) -> Host:
    """Return the compiler for a platform: this machine's own, or the cross compiler.

    Raises:
        MachineError: it is missing.
    """
    program, package = "g++", "g++"
    if MACHINES.get(platform.machine()) != wanted:
        program = f"{_PREFIX[wanted]}-g++"
        package = f"g++-{_PREFIX[wanted].replace('_', '-')}"  # Debian's name
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


def fill(repo: Path, commit: str, wheels: Path, host: Host, tree: Path) -> None:
    """Write the sources, nvcc (``cuda``), headers of tvm-ffi and the stubs into a folder."""
    git.unpack(repo, commit, (*READ, "flashinfer"), tree)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree, [n for n in archive.namelist() if n.startswith(_MEMBERS)])
    cuda = (tree / "nvidia" / "cu13").rename(tree / "cuda")
    for name in _TOLD_THE_PATH:
        (cuda / name).rename(cuda / f"{name}.real")
        shutil.copy(_SAME_PLACE, cuda / name)
    for program in (*cuda.glob("bin/*"), *cuda.glob("nvvm/bin/*")):
        program.chmod(0o755)
    for header in _CUBLAS.glob("*.h"):
        shutil.copy(header, cuda / "include")
    stubs(host, tree / "stubs")
    (tree / "objects").mkdir()


def stubs(host: Host, folder: Path) -> None:
    """Write libraries without functions in place of CUDA's, for the linker.

    A module's functions are looked up when it is loaded: torch and the driver have them by then.
    """
    folder.mkdir()
    for name, soname in _STUBS.items():
        out = folder / f"lib{name}.so"
        linked = ("-shared", "-nostdlib", f"-Wl,-soname,{soname}")
        call(host.program, *linked, "-xc++", "/dev/null", "-o", out)


def describe(tree: Path, arch: str, modules: Sequence[Module]) -> tuple[Described, ...]:
    """Return the sources of modules by FlashInfer's own code; writes generated ones into the tree.

    ``arch`` is e.g. ``12.1f``.

    Raises:
        CommandError: FlashInfer's code has changed so that it cannot be asked.
        BuildError: it gives a module another name than the list.
    """
    request = tree / "request.json"
    asked = [{"generator": module.generator, "arguments": module.arguments} for module in modules]
    request.write_text(json.dumps({"arch": arch, "modules": asked}), encoding="utf-8")
    # isolated but for our own environment, which has jinja2, filelock and others
    out = call(sys.executable, "-I", _DESCRIBE, tree, request).stdout
    found = tuple(
        Described(
            one["name"],
            tuple(one["link"]),
            tuple(Unit(unit["source"], tuple(unit["flags"])) for unit in one["units"]),
        )
        for one in json.loads(out.splitlines()[-1])
    )
    for module, described in zip(modules, found, strict=True):
        if module.name != described.name:
            msg = f"FlashInfer calls the module {module.name} {described.name}"
            raise BuildError(msg, "update sparkforge/build/packs/modules.py")
    return found


def contents(tree: Path, unit: Unit) -> str:
    """Return a digest of a unit's source, and of the headers that were generated for it."""
    path = tree / unit.source
    files = [path]
    if unit.source.startswith("generated/"):
        files += [one for one in path.parent.iterdir() if one.suffix not in (".cu", ".cpp")]
    return key_of({file.name: sha256_file(file) for file in files})


def compile_unit(tree: Path, host: Host, unit: Unit, name: str, out: Path) -> None:
    """Compile a unit to an object, under a name that is the same everywhere; or CommandError."""
    # relative: -objtemp puts nvcc's own files beside it, and some of their names stay in the object
    object_file = f"objects/{name}.o"
    program = [host.program]
    if unit.source.endswith(".cu"):
        program = ["cuda/bin/nvcc", *_NVCC, "-ccbin", host.program]
    words = (*program, "-c", unit.source, *unit.flags, "-o", object_file)
    call(*words, cwd=tree, env=_FLAGS_OF_OTHERS)
    (tree / object_file).rename(out)


def link(tree: Path, host: Host, module: Described, objects: Sequence[Path], out: Path) -> None:
    """Link a module's objects, in the order of their sources.

    Raises:
        CommandError, BuildError: the linker fails; the image lacks libraries as new.
    """
    words: list[str | Path] = [*objects, *_LINK, *module.link, "-o", out]
    call(host.program, *words, cwd=tree, env=_FLAGS_OF_OTHERS)
    text = call("readelf", "--version-info", "--wide", out).stdout.decode()
    for kind, version in sorted(set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text))):
        if tuple(map(int, version.split("."))) > NEWEST[kind]:
            msg = f"{module.name} needs {kind}_{version}, which the image lacks"
            raise BuildError(msg, "compile on Debian 12, Ubuntu 24.04 or older")
