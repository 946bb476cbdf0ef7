"""What decides the bytes of objects and modules: the compilers' tree, their commands, the linker's.

The code of this module is in the keys of objects and modules, so an edit here compiles all of them
again (8 CPU minutes), and an edit elsewhere none.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

from sparkforge.core import git
from sparkforge.core.disk import code_digest
from sparkforge.core.errors import BuildError
from sparkforge.core.run import call

if TYPE_CHECKING:
    from sparkforge.build.packs.toolchain import Host
    from sparkforge.build.packs.units import Described, Unit

READ = ("csrc", "include", "3rdparty")
"""The folders of FlashInfer's sources that compilers read."""
OBJECT = "unit.o"
NEWEST = {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15)}
"""Versions of symbols that the image has: Ubuntu 24.04, as the locks assume (scripts/lock.sh)."""
_MEMBER = re.compile(r"(nvidia/cu13/(?P<cuda>(bin|include|nvvm)/.+)|(?P<ffi>tvm_ffi/include/.+))")
# stand-ins for cuBLAS's headers
_CUBLAS = Path(__file__).with_name("include")
_SAME_PLACE = Path(__file__).with_name("same_place.sh")
_TOLD_THE_PATH = ("bin/cudafe++", "nvvm/bin/cicc")
_STUBS = {"cudart": "libcudart.so.13", "cuda": "libcuda.so.1", "nvrtc": "libnvrtc.so.13"}
# nvcc's names of its own files are random without these
_NVCC = ("-objtemp", "--frandom-seed=1")
# Ubuntu's linker drops libraries that nothing refers to, Debian's keeps them
_LINK = (
    "-shared",
    "-s",
    "-Wl,--no-as-needed",
    "-Wl,--build-id=none",
    "-Lstubs",
    "-lcudart",
    "-lcuda",
)
# the user's, which would change a result
_FLAGS_OF_OTHERS = dict.fromkeys(
    (
        *("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH"),
        *("LIBRARY_PATH", "LD_RUN_PATH"),
    )
)


def digest() -> str:
    """Return one digest of the code that decides the bytes of objects and modules."""
    return code_digest(Path(__file__), _SAME_PLACE, *_CUBLAS.iterdir())


def fill(repo: Path, commit: str, wheels: Path, host: Host, tree: Path) -> None:
    """Write FlashInfer's sources, the compilers and the stubs into a new folder.

    Args:
        wheels: folder with those of nvcc and tvm-ffi.
    """
    git.unpack(repo, commit, (*READ, "flashinfer"), tree)
    _unpack(wheels, tree)
    stubs(host, tree / "stubs")


def _unpack(wheels: Path, folder: Path) -> None:
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
    for header in _CUBLAS.glob("*.h"):
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


def compile_unit(
    tree: Path, host: Host, unit: Unit, name: str, folder: Path
) -> CompletedProcess[bytes]:
    """Compile a unit to ``OBJECT`` in a folder; returns the compiler's end, good or not.

    Args:
        name: of the unit, the same wherever it is compiled.
    """
    # relative: -objtemp puts nvcc's own files beside it, and some of their names stay in the object
    out = f"objects/{name}.o"
    program = [host.program]
    if unit.source.endswith(".cu"):
        program = ["cuda/bin/nvcc", *_NVCC, "-ccbin", host.program]
    words = (*program, "-c", unit.source, *unit.flags, "-o", out)
    done = call(*words, cwd=tree, env=_FLAGS_OF_OTHERS, check=False)
    if done.returncode == 0:
        (tree / out).rename(folder / OBJECT)
    return done


def link(tree: Path, host: Host, module: Described, objects: Sequence[Path], folder: Path) -> Path:
    """Link a module into a folder; returns the library.

    Raises:
        CommandError: the linker fails.
        BuildError: the library needs newer ones than the image has.
    """
    out = folder / f"{module.name}.so"
    env = _FLAGS_OF_OTHERS
    call(host.program, *objects, *_LINK, *module.link, "-o", out, cwd=tree, env=env)
    check_versions(out)
    out.chmod(0o444)
    return out


def check_versions(library: Path) -> None:
    """Check that the image's C and C++ libraries have what a module needs of them.

    Raises:
        BuildError: this machine's are newer.
    """
    text = call("readelf", "--version-info", "--wide", library).stdout.decode()
    for kind, version in sorted(set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text))):
        if tuple(int(part) for part in version.split(".")) > NEWEST[kind]:
            msg = f"{library.name} needs {kind}_{version}, which the image lacks"
            raise BuildError(msg, "compile on Debian 12, Ubuntu 24.04 or older")
