"""CUDA sources → machine code of several architectures, and a manifest of it.

The compiler is NVRTC, from locked wheels: one library and its headers, which need no compiler of
the machine (nvcc calls gcc, and reads the system's headers). The code is the GPU's alone, so the
same files serve on x86-64 and aarch64.
"""

import ctypes
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.pins.types import Plugin

MANIFEST = "manifest.json"
FLAGS = (
    "--std=c++17",
    # internal names hold a number: of the process, without this
    "--frandom-seed=1",
    "--no-cache",
    # has the log say what each kernel uses
    "--ptxas-options=-v",
)
_TOOLCHAIN = "nvidia/cu13/"
# not the library's second build (.alt), nor those that programs are linked with
_MEMBER = re.compile(rf"{_TOOLCHAIN}(include/.+|lib/libnvrtc(-builtins)?\.so\.[0-9.]+)")
_SHOWN_LINES = 20
# ptxas's report on a kernel
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '\S+'\n"
    r".*\n"
    r".*?(?P<local>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?:.*, (?P<shared>\d+) bytes smem)?"
)


Kernel = dict[str, Any]
"""What a kernel uses: ``registers`` and ``local`` (stack, bytes) of a thread, ``shared`` (static)
bytes of a block, and ``spills``: bytes of registers that a thread stores and loads."""


def unpack(wheels: Path, folder: Path) -> None:
    """Write the compiler's library and headers from its wheels into a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if _MEMBER.fullmatch(n)])


def build(pin: Plugin, tree: Path, version: str, toolchain: Path, out: Path) -> dict[str, str]:
    """Compile for every architecture; returns the sha256 of machine code and manifest by name.

    Args:
        tree: folder that the source is in; all files of the source's folder are sources.
        version: of the compiler.
        toolchain: as ``unpack`` writes it.
    """
    root = toolchain / _TOOLCHAIN
    # NVRTC loads the other one by its name alone
    _, library = (
        ctypes.CDLL(str(next(root.glob(f"lib/{name}.so.*"))), mode=ctypes.RTLD_GLOBAL)
        for name in ("libnvrtc-builtins", "libnvrtc")
    )

    def compiled(arch: str, _: Event) -> list[Kernel]:
        place = (tree / pin.source).parent
        folders = (f"--include-path={folder}" for folder in (place, root / "include"))
        options = (*FLAGS, f"--gpu-architecture=sm_{arch}", *folders)
        code, text = _compile(library, pin.source, (tree / pin.source).read_bytes(), options)
        log.detail(text)
        if code is None:
            said = "\n".join(text.splitlines()[:_SHOWN_LINES])
            remedy = "use only what NVRTC has (docs/kernels.md); all errors: -v"
            raise BuildError(f"{pin.source}: sm_{arch} cannot be compiled:\n{said}", remedy)
        (out / f"sm_{arch}.cubin").write_bytes(code)
        return _usage(text)

    every = pin.architectures
    found = dict(zip(every, in_parallel(compiled, every, len(every)), strict=True))
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
                "kernels": kernels,
            }
            for arch, kernels in found.items()
        ],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return {path.name: sha256_file(path) for path in sorted(out.iterdir())}


def _compile(
    nvrtc: ctypes.CDLL, name: str, source: bytes, options: Sequence[str]
) -> tuple[bytes | None, str]:
    """Return the machine code of a source and the compiler's log; None: it refuses the source."""
    program = ctypes.c_void_p()

    def read(kind: str) -> bytes:
        size = ctypes.c_size_t()
        nvrtc[f"nvrtcGet{kind}Size"](program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        nvrtc[f"nvrtcGet{kind}"](program, buffer)
        return buffer.raw

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    text = read("ProgramLog").rstrip(b"\0").decode(errors="replace")
    return None if failed else read("CUBIN"), text


def _usage(text: str) -> list[Kernel]:
    """Return the kernels that a log of ptxas describes, by name."""
    kernels: list[Kernel] = []
    for match in _USAGE.finditer(text):
        kernel: Kernel = {"name": match["name"]}
        kernel |= {key: int(match[key] or 0) for key in ("registers", "shared", "local")}
        kernels.append({**kernel, "spills": int(match["stores"]) + int(match["loads"])})
    return sorted(kernels, key=lambda kernel: kernel["name"])


def _check(found: Mapping[str, Sequence[Kernel]], pin: Plugin) -> None:
    """Refuse kernels with undeclared spills, and architectures that lack a kernel."""
    names = [{kernel["name"] for kernel in kernels} for kernels in found.values()]
    if not names[0] or any(one != names[0] for one in names):
        msg = f"{pin.source}: not every architecture has the same kernels: {names}"
        raise BuildError(msg, 'declare kernels as extern "C" __global__, for all architectures')
    spilling = [
        f"sm_{arch} {kernel['name']}: {kernel['spills']} B, {kernel['local']} B of stack"
        for arch, kernels in found.items()
        for kernel in kernels
        if (kernel["local"] or kernel["spills"]) and kernel["name"] not in pin.spills
    ]
    if spilling:
        msg = f"{pin.source}: kernels keep registers in memory (spills): {'; '.join(spilling)}"
        raise BuildError(msg, "use fewer registers, or list them in plugin.spills in pins.yaml")
