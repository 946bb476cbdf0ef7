"""CUDA sources → machine code of several architectures, and a manifest of it.

The compiler is NVRTC, from locked wheels: one library and its headers, which need no compiler of
the machine (nvcc calls gcc, and reads the system's headers). The code is the GPU's alone, so the
same files serve on x86-64 and aarch64.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from sparkforge.build.jobs import width
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.core.run import call, in_parallel
from sparkforge.pins.compiling import Plugin

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
_ERROR = re.compile(r"^(\S+)\((\d+)\): (?:catastrophic )?error: (.+)$", re.MULTILINE)
# ptxas's report on a kernel
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '\S+'\n"
    r".*\n"
    r".*?(?P<local>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?:.*, (?P<shared>\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Kernel:
    """Resources that one kernel uses."""

    name: str
    registers: int
    """Of a thread."""
    shared: int
    """Static shared memory of a block, bytes."""
    local: int
    """Stack of a thread, bytes."""
    spills: int
    """Registers that are kept in memory: bytes stored and loaded by a thread."""


def unpack(wheels: Path, folder: Path) -> None:
    """Write the compiler's library and headers from its wheels into a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if _MEMBER.fullmatch(n)])


def build(pin: Plugin, tree: Path, version: str, toolchain: Path, out: Path) -> dict[str, str]:
    """Compile for every architecture; machine code and manifest go into ``out``.

    Args:
        tree: folder that the source is in; all files of the source's folder are sources.
        version: of the compiler.
        toolchain: as ``unpack`` writes it.

    Returns:
        sha256 by file name.
    """

    def compiled(arch: str, _: Event) -> tuple[Kernel, ...]:
        return _usage(_compile(pin.source, tree, toolchain, arch, out / f"sm_{arch}.cubin"))

    every = pin.architectures
    at_once = min(len(every), width(None, _GIB_PER_JOB))
    log.info(f"{pin.source}: {len(every)} architectures, {at_once} at once")
    found = dict(zip(every, in_parallel(compiled, every, at_once), strict=True))
    _check(found, pin)
    sources = sorted(path for path in (tree / pin.source).parent.rglob("*") if path.is_file())
    manifest = {
        "schema": 1,
        "sources": {path.relative_to(tree).as_posix(): sha256_file(path) for path in sources},
        "compiler": version,
        "flags": FLAGS,
        "cubins": [
            {
                "architecture": arch,
                "file": (cubin := out / f"sm_{arch}.cubin").name,
                "sha256": sha256_file(cubin),
                "size": cubin.stat().st_size,
                "kernels": [asdict(kernel) for kernel in kernels],
            }
            for arch, kernels in found.items()
        ],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return {path.name: sha256_file(path) for path in sorted(out.iterdir())}


def _compile(source: str, tree: Path, toolchain: Path, arch: str, out: Path) -> str:
    """Return the compiler's output."""
    root = toolchain / _TOOLCHAIN
    (library,) = root.glob("lib/libnvrtc.so.*")
    done = call(
        sys.executable,
        "-IS",
        _PROGRAM,
        library,
        source,
        out,
        *FLAGS,
        f"--gpu-architecture=sm_{arch}",
        f"--include-path={source.rpartition('/')[0]}",
        f"--include-path={root / 'include'}",
        cwd=tree,
        env={"LD_LIBRARY_PATH": str(library.parent)},  # it loads a second one
        check=False,
        timeout=_LIMIT_S,
    )
    text = done.stdout.decode(errors="replace")
    log.detail(text)
    if not done.returncode:
        return text
    if errors := _ERROR.findall(text):
        path, line, what = errors[0]
        more = f", and {len(errors) - 1} more errors" if len(errors) > 1 else ""
        remedy = "use only what NVRTC has (docs/kernels.md)"
        raise BuildError(f"{path}:{line}: {what} (sm_{arch}{more})", remedy)
    lines = (text or done.stderr.decode(errors="replace")).strip().splitlines()[-_SHOWN_LINES:]
    said = "".join(f"\n    {line}" for line in lines)
    raise BuildError(f"{source}: sm_{arch} cannot be compiled:{said}")


def _usage(text: str) -> tuple[Kernel, ...]:
    """Return the kernels that a log of ptxas describes, by name."""
    kernels = []
    for match in _USAGE.finditer(text):
        uses = {
            name: int(value or 0) for name, value in match.groupdict().items() if name != "name"
        }
        spills = uses.pop("stores") + uses.pop("loads")
        kernels.append(Kernel(match["name"], **uses, spills=spills))
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _check(found: Mapping[str, Sequence[Kernel]], pin: Plugin) -> None:
    """Refuse kernels with undeclared spills, and architectures that lack a kernel."""
    names = {arch: {kernel.name for kernel in kernels} for arch, kernels in found.items()}
    every = set().union(*names.values())
    if not every:
        msg = f"{pin.source}: no kernel is in it"
        raise BuildError(msg, 'declare kernels as extern "C" __global__')
    for arch, here in names.items():
        if missing := sorted(every - here):
            msg = f"{pin.source}: sm_{arch} has no {missing[0]}, which others have"
            raise BuildError(msg, "compile every kernel for every architecture")
    spilling = [
        (kernel.name, f"\n  sm_{arch} {kernel.name}: {kernel.spills} B, {kernel.local} B of stack")
        for arch, kernels in found.items()
        for kernel in kernels
        if kernel.local or kernel.spills
    ]
    if lines := [line for name, line in spilling if name not in pin.spills]:
        msg = f"{pin.source}: kernels keep registers in memory (spills):{''.join(lines)}"
        raise BuildError(msg, "use fewer registers, or list them in plugin.spills in pins.yaml")
    if needless := sorted(set(pin.spills) - {name for name, _ in spilling}):
        msg = f"{pin.source}: {needless[0]} does not spill, but plugin.spills lists it"
        raise BuildError(msg, "remove it there, in pins.yaml")
