"""CUDA sources → machine code of several architectures, and a manifest of it.

The compiler is NVRTC, from locked wheels: one library and its headers, which need no compiler of
the machine (nvcc calls gcc, and reads the system's headers). The code is the GPU's alone, so the
same files serve on x86-64 and aarch64.
"""

from __future__ import annotations

import json
import re
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from sparkforge.build.jobs import width
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError
from sparkforge.core.log import human_bytes, log
from sparkforge.core.run import call, in_parallel

MANIFEST = "manifest.json"
FLAGS = (
    "--std=c++17",
    # internal names hold a number: of the process, without this
    "--frandom-seed=1",
    "--no-cache",
    # has the log say what each kernel uses
    "--ptxas-options=-v",
)
_PROGRAM = Path(__file__).with_name("nvrtc.py")
_TOOLCHAIN = "nvidia/cu13/"
# not the library's second build (.alt), nor those that programs are linked with
_MEMBER = re.compile(rf"{_TOOLCHAIN}(include/.+|lib/libnvrtc(-builtins)?\.so\.[0-9.]+)")
_GIB_PER_JOB = 1.0  # one took 0.2 GiB
_LIMIT_S = 1800.0  # one takes seconds
_SHOWN_LINES = 20


@dataclass(frozen=True)
class Kernel:
    """Resources that one kernel uses.

    Attributes:
        registers: of a thread.
        shared: static shared memory of a block, bytes.
        local: stack of a thread, bytes.
        spills: registers that are kept in memory: bytes stored and loaded by a thread.
    """

    name: str
    registers: int
    shared: int
    local: int
    spills: int


@dataclass(frozen=True)
class Request:
    """The input of a compile.

    Attributes:
        tree: folder that ``source`` is in.
        source: the file, e.g. ``kernels/csrc/kernels.cu``; all files of its folder are sources.
        architectures: e.g. ``121a``.
        spills: kernels that may keep registers in memory.
        version: of the compiler.
    """

    tree: Path
    source: str
    architectures: tuple[str, ...]
    spills: tuple[str, ...]
    version: str


def unpack(wheels: Path, folder: Path) -> None:
    """Write the compiler's library and headers from its wheels into a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if _MEMBER.fullmatch(member):
                    archive.extract(member, folder)


def build(request: Request, toolchain: Path, out: Path) -> dict[str, str]:
    """Compile for every architecture, and write machine code and manifest into ``out``.

    Args:
        toolchain: as ``unpack`` writes it.

    Returns:
        sha256 by file name.

    Raises:
        BuildError: the compiler refuses a source, or a kernel keeps values of a thread in memory.
        CommandError: the compiler cannot run, or does not end.
    """

    def compiled(arch: str, stopping: Event) -> tuple[str, tuple[Kernel, ...]]:
        start = time.monotonic()
        text = _compile(request, toolchain, arch, out / f"sm_{arch}.cubin")
        size = human_bytes((out / f"sm_{arch}.cubin").stat().st_size)
        kernels = usage(text)
        log.info(f"sm_{arch}: {len(kernels)} kernels, {size}, {time.monotonic() - start:.0f} s")
        return arch, kernels

    every = request.architectures
    at_once = min(len(every), width(None, _GIB_PER_JOB))
    log.info(f"{request.source}: {len(every)} architectures, {at_once} at once")
    found = dict(in_parallel(compiled, every, at_once))
    _check(found, request)
    (out / MANIFEST).write_bytes(_manifest(request, found, out))
    return {path.name: sha256_file(path) for path in sorted(out.iterdir())}


def _compile(request: Request, toolchain: Path, arch: str, out: Path) -> str:
    """Return the compiler's output."""
    root = toolchain / _TOOLCHAIN
    (library,) = root.glob("lib/libnvrtc.so.*")
    done = call(
        sys.executable,
        "-IS",
        _PROGRAM,
        library,
        request.source,
        out,
        *FLAGS,
        f"--gpu-architecture=sm_{arch}",
        f"--include-path={request.source.rpartition('/')[0]}",
        f"--include-path={root / 'include'}",
        cwd=request.tree,
        env={"LD_LIBRARY_PATH": str(library.parent)},  # it loads a second one
        check=False,
        timeout=_LIMIT_S,
    )
    text = done.stdout.decode(errors="replace")
    log.detail(text)
    if done.returncode:
        raise _failure(request, arch, text or done.stderr.decode(errors="replace"))
    return text


_ERROR = re.compile(r"^(\S+)\((\d+)\): (?:catastrophic )?error: (.+)$", re.MULTILINE)


def _failure(request: Request, arch: str, text: str) -> BuildError:
    """Return the error of a compiler's output: the first place that it names."""
    errors = _ERROR.findall(text)
    if not errors:
        lines = [line for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]
        said = "\n".join(f"    {line}" for line in lines)
        return BuildError(f"{request.source}: sm_{arch} cannot be compiled:\n{said}")
    path, line, what = errors[0]
    more = f", and {len(errors) - 1} more errors" if len(errors) > 1 else ""
    remedy = "use only what NVRTC has (docs/kernels.md)"
    return BuildError(f"{path}:{line}: {what} (sm_{arch}{more})", remedy)


_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '\S+'\n"
    r".*\n"
    r".*?(?P<local>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?P<rest>.*)"
)
_SHARED = re.compile(r", (\d+) bytes smem")


def usage(text: str) -> tuple[Kernel, ...]:
    """Return the kernels that a log of ptxas describes, by name."""
    kernels = []
    for match in _USAGE.finditer(text):
        shared = _SHARED.search(match["rest"])
        kernels.append(
            Kernel(
                match["name"],
                int(match["registers"]),
                int(shared[1]) if shared else 0,
                int(match["local"]),
                int(match["stores"]) + int(match["loads"]),
            )
        )
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _check(found: Mapping[str, Sequence[Kernel]], request: Request) -> None:
    """Refuse kernels with undeclared spills, and architectures that lack a kernel."""
    names = {arch: {kernel.name for kernel in kernels} for arch, kernels in found.items()}
    every = set().union(*names.values())
    if not every:
        msg = f"{request.source}: no kernel is in it"
        raise BuildError(msg, 'declare kernels as extern "C" __global__')
    for arch, here in names.items():
        if missing := sorted(every - here):
            msg = f"{request.source}: sm_{arch} has no {missing[0]}, which others have"
            raise BuildError(msg, "compile every kernel for every architecture")
    spilling = [
        (kernel.name, f"sm_{arch} {kernel.name}: {kernel.spills} B, {kernel.local} B of stack")
        for arch, kernels in found.items()
        for kernel in kernels
        if kernel.local or kernel.spills
    ]
    if lines := [f"\n  {line}" for name, line in spilling if name not in request.spills]:
        msg = f"{request.source}: kernels keep registers in memory (spills):{''.join(lines)}"
        raise BuildError(msg, "use fewer registers, or list them in plugin.spills in pins.yaml")
    known = {name for name, _ in spilling}
    if needless := [name for name in request.spills if name not in known]:
        msg = f"{request.source}: {needless[0]} does not spill, but plugin.spills lists it"
        raise BuildError(msg, "remove it there, in pins.yaml")


def _manifest(request: Request, found: Mapping[str, Sequence[Kernel]], out: Path) -> bytes:
    """Return the manifest: the origin of the machine code, and the resources of each kernel."""

    def cubin(arch: str) -> dict[str, object]:
        data = (out / f"sm_{arch}.cubin").read_bytes()
        return {
            "architecture": arch,
            "file": f"sm_{arch}.cubin",
            "sha256": sha256(data).hexdigest(),
            "size": len(data),
            "kernels": [asdict(kernel) for kernel in found[arch]],
        }

    sources = (request.tree / request.source).parent
    manifest = {
        "schema": 1,
        "sources": {
            path.relative_to(request.tree).as_posix(): sha256_file(path)
            for path in sorted(sources.rglob("*"))
            if path.is_file()
        },
        "compiler": request.version,
        "flags": FLAGS,
        "cubins": [cubin(arch) for arch in request.architectures],
    }
    return (json.dumps(manifest, indent=1) + "\n").encode()
