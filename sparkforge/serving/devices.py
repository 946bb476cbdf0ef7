"""The CUDA devices of this machine, FlashInfer's modules for them, and the caches of kernels.

These distinguish versions, but not our patches: they are in a folder for each build and device.
"""

import ctypes
import errno
import hashlib
import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkforge.serving.options import EX_CANTCREAT, EX_CONFIG, EX_UNAVAILABLE, StartError, say

Capability = tuple[int, int]  # major and minor: (12, 1) is a Spark's


def capabilities(library: str = "libcuda.so.1") -> list[Capability]:
    """Return the capability of each device."""
    return [capability for capability, _ in _devices(library)]


def unified_bytes(library: str = "libcuda.so.1") -> int | None:
    """Return the memory of the first device that uses the host's, as CUDA counts it, or None."""
    return next((size for _, size in _devices(library) if size), None)


def _devices(library: str) -> Iterator[tuple[Capability, int]]:
    """Yield capability and unified bytes of each device, without a context on the device."""
    number, handle, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
        return
    for index in range(number.value):
        cuda.cuDeviceGet(ctypes.byref(handle), index)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
        found = []
        for name in (75, 76, 18):  # CU_DEVICE_ATTRIBUTE_* of cuda.h
            cuda.cuDeviceGetAttribute(ctypes.byref(number), name, handle)
            found.append(number.value)
        major, minor, integrated = found
        yield (major, minor), total.value if integrated == 1 else 0


def check(wanted: str, there: Sequence[Capability], *, strict: bool) -> None:
    """Compare the devices with the image's target; StartError for none, if ``strict``."""
    names = [f"{major}.{minor}" for major, minor in there]
    msg = f"this image is for devices of compute capability {wanted}, not {', '.join(names)}"
    if not there:
        msg = "no CUDA device is visible in this container: docker run needs --gpus all (Compose"
        msg += " has it), and build.py doctor checks the host"
    if strict and not there:
        raise StartError(msg, EX_UNAVAILABLE)
    if wanted not in names:
        say(f"warning: {msg}")


def driver() -> str:
    """Return the release of NVIDIA's driver, or "" where there is none."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.[.\d]+)\s", file.read_text() if file.exists() else "")
    return found[1] if found else ""


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Return whether a C++ compiler is on the PATH."""
    return any(shutil.which(name, path=environment.get("PATH")) for name in ("c++", "g++"))


def flashinfer_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the server's variables for the modules that were compiled with the image.

    vLLM uses FlashInfer only where nvcc is on the PATH, or where VLLM_HAS_FLASHINFER_CUBIN is set.
    """
    nvcc = shutil.which("nvcc", path=given.get("PATH"))
    compiles = shutil.which(nvcc or "/usr/local/cuda/bin/nvcc") and has_compiler(given)
    chosen = {"MAX_JOBS": "2"} if compiles else {}  # the largest takes 8 GiB
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        if nvcc is None:
            chosen["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
        if not compiles:
            chosen["FLASHINFER_DISABLE_JIT"] = "1"
    return {name: text for name, text in chosen.items() if not given.get(name)}


KEPT = 3  # builds and devices whose kernels are kept: also those of an image to roll back to
CACHES = (  # variables of the server for folders; a user's own value has priority
    *("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
    *("TRITON_HOME", "FLASHINFER_WORKSPACE_BASE", "TVM_FFI_CACHE_DIR", "CUTE_DSL_CACHE_DIR"),
    *("DG_JIT_CACHE_DIR", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH"),
)


def caches(
    root: Path, share: Path, release: str, variables: Mapping[str, str]
) -> tuple[Path, dict[str, str]]:
    """Make the folder of this build and device, and remove those of the oldest others.

    Its name has the image's release, a digest of its inputs, and the device.
    """
    inputs = share / "inputs.json"  # none outside of an image
    digest = hashlib.sha256(inputs.read_bytes() if inputs.exists() else b"").hexdigest()[:12]
    build = f"{re.sub(r'[^A-Za-z0-9.+_]', '_', release) or 'unreleased'}-{digest}"
    there = sorted({f"sm{major}{minor}" for major, minor in capabilities()})
    folder = root / f"{build}-{'-'.join(there) or platform.machine()}"
    chosen = {name: variables.get(name) or str(folder / name.lower()) for name in CACHES}
    # for libraries without a variable of their own; the image sets both for other programs
    chosen |= {name: str(folder / name.lower()) for name in ("HOME", "XDG_CACHE_HOME")}
    try:
        for path in chosen.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        # our mark; a full disk is an error here, not of a compiler
        (folder / "used").write_text("by this build and device\n")
        others = [mark for mark in root.glob("*/used") if mark.parent != folder]
        for mark in sorted(others, key=lambda mark: mark.stat().st_mtime)[: 1 - KEPT]:
            say(f"removing the kernels of an older build, {mark.parent.name}")
            shutil.rmtree(mark.parent)
    except OSError as error:
        msg = f"compiled kernels cannot be stored in {root} (SPARKFORGE_JIT_DIR): {error}"
        code = EX_CANTCREAT if error.errno == errno.ENOSPC else EX_CONFIG
        raise StartError(msg, code) from None
    say(f"compiled kernels are stored in {folder}")
    return folder, chosen
