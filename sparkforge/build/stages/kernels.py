"""The machine code of our kernels, and the wheel of our plugin for vLLM with it.

The compiler is NVRTC, from locked wheels: one library and its headers, which need no compiler of
the machine (nvcc calls gcc, and reads the system's headers). The code is the GPU's alone, so the
same files serve on x86-64 and aarch64, and the wheel is one file for all targets and processors.
"""

import ctypes
import json
import re
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import PLUGIN, WHEELS, Context
from sparkforge.build.results import FilesResult, PluginResult, all_intact
from sparkforge.build.stages.thirdparty import compiler, fill, to_fetch, version
from sparkforge.build.stages.wheels import holds_wheel
from sparkforge.core.disk import digests, sha256_file
from sparkforge.core.errors import BuildError, PinsError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.pins.types import Plugin
from sparkforge.wheels import archive

CUBINS = "decode/cubins"
"""The folder of the package with the machine code and its manifest."""
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
# ptxas's report on a kernel
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '\S+'\n"
    r".*\n"
    r".*?(?P<local>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?:.*, (?P<shared>\d+) bytes smem)?"
)


def _read(root: Path, folder: Path, pattern: str, first: str) -> dict[str, bytes]:
    """Return files by their paths in the checkout; PinsError if the ``first`` is not there."""
    paths = sorted(folder.rglob(pattern))
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    if first not in found:
        raise PinsError(f"plugin.folder: {first} does not exist", "restore it: git checkout")
    return found


def kernels_item(context: Context, pin: Plugin) -> Cached[FilesResult]:
    """Return the machine code of a plugin's kernels; PinsError if there are no sources."""
    sources = _read(context.root, (context.root / pin.source).parent, "*.cu*", pin.source)
    lock = context.root / pin.requirements
    inputs = {
        "source": pin.source,
        "sources": digests(sources),
        "architectures": list(pin.architectures),
        "spills": list(pin.spills),
        # of all platforms: the machine code does not depend on where it is compiled
        "compiler": sha256_file(lock),
    }

    def make(folder: Path) -> FilesResult:
        with context.store.temporary("kernels") as work:
            fill(context, compiler(lock), work / WHEELS)
            unpack(work / WHEELS, work / "toolchain")
            for path, data in sources.items():
                (work / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
                (work / "tree" / path).write_bytes(data)
            of = version(lock, "nvidia-cuda-nvrtc")
            return FilesResult(build(pin, work / "tree", of, work / "toolchain", folder))

    what = ("kernels", "kernels", inputs, FilesResult, make)
    return Cached(*what, valid=all_intact, fetches=lambda: to_fetch(context, compiler(lock)))


def plugin_item(
    context: Context, pin: Plugin, kernels: Cached[FilesResult]
) -> Cached[PluginResult]:
    """Return the wheel of a plugin; PinsError if its files are missing or wrong."""
    pyproject = context.root / pin.folder / "pyproject.toml"
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        licenses = {
            file: (pyproject.parent / file).read_bytes() for file in project["license-files"]
        }
        metadata = (
            f"Summary: {project['description']}",
            f"License-Expression: {project['license']}",
            *(f"License-File: {file}" for file in licenses),
            f"Requires-Python: {project['requires-python']}",
        )
        about = (str(project["name"]), project["version"], "py3-none-any", metadata)
        entry_points = project["entry-points"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise PinsError(f"{pyproject}: {error}") from None
    name = about[0].replace("-", "_")
    package = _read(
        context.root, pyproject.parent / name, "*.py", f"{pin.folder}{name}/__init__.py"
    )
    inside = f"{name}/{CUBINS}"
    inputs = {
        "pyproject": sha256_file(pyproject),
        "package": digests(package),
        "licenses": digests(licenses),
        "kernels": kernels.inputs,
        "epoch": context.epoch,
    }

    def make(folder: Path) -> PluginResult:
        code = kernels.result.files
        members = {path.removeprefix(pin.folder): data for path, data in package.items()}
        for file, sha256 in code.items():
            members[f"{inside}/{file}"] = undamaged(kernels.path / file, sha256).read_bytes()
        wheel = archive.Fresh(*about, members, entry_points, licenses)
        path = archive.write_fresh(wheel, context.epoch, folder)
        held = {f"{inside}/{file}": sha256 for file, sha256 in code.items()}
        return PluginResult(path.name, sha256_file(path), about[1], held)

    return Cached("kernels", PLUGIN, inputs, PluginResult, make, (kernels,), valid=holds_wheel)


def unpack(wheels: Path, folder: Path) -> None:
    """Write the compiler's library and headers from its wheels into a folder."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [n for n in packed.namelist() if _MEMBER.fullmatch(n)])


def build(pin: Plugin, tree: Path, version: str, toolchain: Path, out: Path) -> dict[str, str]:
    """Compile for every architecture; returns the sha256 of machine code and manifest by name.

    ``tree`` has the source in a folder whose files all are sources; ``toolchain`` is as ``unpack``
    writes it, of that version. BuildError: undeclared spills, or an architecture lacks a kernel.
    """
    root, place = toolchain / _TOOLCHAIN, (tree / pin.source).parent
    # NVRTC loads the other one by its name alone
    _, library = (
        ctypes.CDLL(str(next(root.glob(f"lib/{name}.so.*"))), mode=ctypes.RTLD_GLOBAL)
        for name in ("libnvrtc-builtins", "libnvrtc")
    )
    folders = [f"--include-path={folder}" for folder in (place, root / "include")]

    def compiled(arch: str, _: Event) -> list[dict[str, Any]]:
        options = (*FLAGS, f"--gpu-architecture=sm_{arch}", *folders)
        code, text = _compile(library, pin.source, (tree / pin.source).read_bytes(), options)
        log.detail(text)
        if code is None:
            said = "\n".join(text.splitlines()[:20])
            remedy = "use only what NVRTC has (docs/kernels.md); all errors: -v"
            raise BuildError(f"{pin.source}: sm_{arch} cannot be compiled:\n{said}", remedy)
        (out / f"sm_{arch}.cubin").write_bytes(code)
        # what each uses: registers and local (stack, bytes) of a thread, shared (static) bytes of a
        # block, and spills: bytes of registers that a thread stores and loads
        kernels = [
            {
                "name": match["name"],
                **{key: int(match[key] or 0) for key in ("registers", "shared", "local")},
                "spills": int(match["stores"]) + int(match["loads"]),
            }
            for match in _USAGE.finditer(text)
        ]
        return sorted(kernels, key=lambda kernel: str(kernel["name"]))

    every = pin.architectures
    found = dict(zip(every, in_parallel(compiled, every, len(every)), strict=True))
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
    sources = sorted(path for path in place.rglob("*") if path.is_file())
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
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
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
