"""Ask FlashInfer's own code for the sources of modules. Run as a script, apart from sparkforge.

usage: describe.py TREE REQUEST.json   (writes TREE/generated, prints one JSON document)

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
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


def stand_ins() -> None:
    """Register what FlashInfer imports of torch and tvm_ffi."""
    half = _Named("float16")
    torch = ModuleType("torch")
    vars(torch).update(
        {"dtype": _Named, "Tensor": object, "half": half, "float16": half},
        version=SimpleNamespace(cuda=CUDA),
        _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
        __getattr__=functools.cache(_Named),  # other data types
    )
    sys.modules |= {"torch": torch, "tvm_ffi": ModuleType("tvm_ffi")}


def _prepare(tree: Path, arch: str) -> None:
    """Make FlashInfer read its sources in the tree, for a device, e.g. ``12.1f``."""
    for name in list(os.environ):  # what changes flags
        if name.startswith(("FLASHINFER_EXTRA_", "FLASHINFER_JIT_", "FLASHINFER_NVCC")):
            del os.environ[name]
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(tree / "workspace")
    for name in ("flashinfer", "flashinfer.jit"):  # without their __init__, which import the rest
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(tree / name.replace(".", "/"))]
    env: Any = importlib.import_module("flashinfer.jit.env")
    vars(sys.modules["flashinfer.jit"])["env"] = env
    external = tree / "3rdparty"
    cutlass, cccl = external / "cutlass", external / "cccl"
    env.FLASHINFER_CSRC_DIR = tree / "csrc"
    env.FLASHINFER_INCLUDE_DIR = tree / "include"
    env.FLASHINFER_GEN_SRC_DIR = tree / "generated"
    env.FLASHINFER_JIT_DIR = tree / "objects"
    env.CUTLASS_INCLUDE_DIRS = [cutlass / "include", cutlass / "tools" / "util" / "include"]
    env.CCCL_INCLUDE_DIRS = [cccl / "cub", cccl / "libcudacxx" / "include", cccl / "thrust"]
    env.SPDLOG_INCLUDE_DIR = external / "spdlog" / "include"
    flags: Any = importlib.import_module("flashinfer.jit.cpp_ext")
    version: Any = importlib.import_module("packaging.version")
    flags.get_cuda_version = lambda: version.Version(CUDA)
    flags.get_cuda_path = lambda: "cuda"
    flags.sysconfig = SimpleNamespace(get_path=lambda _: "python", get_config_var=lambda _: None)
    libinfo = SimpleNamespace(
        find_include_path=lambda: HEADERS, find_dlpack_include_path=lambda: HEADERS
    )
    flags.tvm_ffi = SimpleNamespace(libinfo=libinfo)


def _value(given: Any) -> Any:
    for prefix, module in (("torch.", "torch"), ("variants.", "flashinfer.jit.attention.variants")):
        if isinstance(given, str) and given.startswith(prefix):
            return getattr(importlib.import_module(module), given.removeprefix(prefix))
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
    # FlashInfer lists generated files as the folder has them
    units.sort(key=lambda unit: unit["source"])
    return {"name": spec.name, "link": spec.extra_ldflags or [], "units": units}


def main(tree: Path, request: Path) -> None:
    """Print the modules of a request."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    _prepare(tree, asked["arch"])
    json.dump([_described(tree, **module) for module in asked["modules"]], sys.stdout)


if __name__ == "__main__":
    stand_ins()
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
