"""Ask FlashInfer's own code for the sources of modules. Run as a script, apart from sparkforge.

usage: describe.py TREE REQUEST.json [torch]   (writes TREE/generated, prints one JSON document)

The tree is FlashInfer's patched source; generated sources are written below it. Of FlashInfer only
``flashinfer.jit`` is imported. torch and tvm_ffi, of which that needs nothing but names, are
stand-ins without the word ``torch``: a test compares both. Paths in the result are
relative to the tree, so the result does not depend on its place.
"""

import functools
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

CUDA = "13.0"
HEADERS = "tvm_ffi/include"
"""Of tvm_ffi, and of dlpack in it: a folder that the compiler finds next to the tree."""


class _Named:
    """A data type, which FlashInfer compares and looks up."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


def _stand_ins() -> None:
    torch = types.ModuleType("torch")
    vars(torch).update(dtype=_Named, Tensor=object, half=_Named("float16"))
    vars(torch)["float16"] = torch.half
    vars(torch)["version"] = types.SimpleNamespace(cuda=CUDA)
    vars(torch)["_C"] = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
    vars(torch)["__getattr__"] = functools.cache(_Named)  # other data types
    sys.modules["torch"] = torch
    sys.modules["tvm_ffi"] = types.ModuleType("tvm_ffi")


def _package(name: str, folder: Path) -> Any:
    """Register a package without running its ``__init__``, which imports all of FlashInfer."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


def _prepare(tree: Path, arch: str) -> None:
    """Make FlashInfer read its sources in the tree, for CUDA and the device given.

    Args:
        arch: e.g. ``12.1f``.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(tree / "workspace")
    for name in list(os.environ):  # what changes flags
        if name.startswith(("FLASHINFER_EXTRA_", "FLASHINFER_JIT_", "FLASHINFER_NVCC")):
            del os.environ[name]
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)
    _package("flashinfer", tree / "flashinfer")
    jit = _package("flashinfer.jit", tree / "flashinfer" / "jit")
    env: Any = importlib.import_module("flashinfer.jit.env")
    jit.env = env
    external = tree / "3rdparty"
    env.FLASHINFER_CSRC_DIR = tree / "csrc"
    env.FLASHINFER_INCLUDE_DIR = tree / "include"
    env.FLASHINFER_GEN_SRC_DIR = tree / "generated"
    env.FLASHINFER_JIT_DIR = tree / "objects"
    env.CUTLASS_INCLUDE_DIRS = [
        external / "cutlass" / "include",
        external / "cutlass" / "tools" / "util" / "include",
    ]
    cccl = external / "cccl"
    env.CCCL_INCLUDE_DIRS = [cccl / "cub", cccl / "libcudacxx" / "include", cccl / "thrust"]
    env.SPDLOG_INCLUDE_DIR = external / "spdlog" / "include"
    flags: Any = importlib.import_module("flashinfer.jit.cpp_ext")
    version: Any = importlib.import_module("packaging.version")
    flags.get_cuda_version = lambda: version.Version(CUDA)
    flags.get_cuda_path = lambda: "cuda"
    flags.sysconfig = types.SimpleNamespace(
        get_path=lambda _: "python", get_config_var=lambda _: None
    )
    paths = types.SimpleNamespace(
        find_include_path=lambda: HEADERS, find_dlpack_include_path=lambda: HEADERS
    )
    flags.tvm_ffi = types.SimpleNamespace(libinfo=paths)


def _value(given: Any) -> Any:
    if isinstance(given, str) and given.startswith("torch."):
        return getattr(sys.modules["torch"], given.removeprefix("torch."))
    if isinstance(given, str) and given.startswith("variants."):
        variants = importlib.import_module("flashinfer.jit.attention.variants")
        return getattr(variants, given.removeprefix("variants."))
    return given


def _described(tree: Path, generator: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return one module: its name, linker flags, and its units with their flags."""
    module, _, name = generator.partition(":")
    make = getattr(importlib.import_module(f"flashinfer.jit.{module}"), name)
    spec = make(**{key: _value(value) for key, value in arguments.items()})
    if spec.needs_device_linking:
        raise SystemExit(f"{spec.name}: needs nvcc as its linker: leave it out of modules.py")
    units = []
    for source, entry in zip(spec.sources, spec.get_compile_commands(), strict=True):
        words = entry["command"].replace(f"{tree}/", "").split()
        # compiler, -c and source in front, -o and object behind
        if words[1] != "-c" or words[-2] != "-o":
            raise SystemExit(f"{spec.name}: not a command of the known form: {entry['command']}")
        units.append({"source": source.relative_to(tree).as_posix(), "flags": words[3:-2]})
    return {
        "name": spec.name,
        "link": spec.extra_ldflags or [],
        # FlashInfer lists generated files as the folder has them
        "units": sorted(units, key=lambda unit: unit["source"]),
    }


def main(tree: Path, request: Path, *, installed: bool) -> None:
    """Print the modules of a request.

    Args:
        installed: use the installed torch and tvm_ffi.
    """
    asked = json.loads(request.read_text(encoding="utf-8"))
    if not installed:
        _stand_ins()
    _prepare(tree, asked["arch"])
    modules = [
        _described(tree, module["generator"], module["arguments"]) for module in asked["modules"]
    ]
    json.dump(modules, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), installed="torch" in sys.argv[3:])
