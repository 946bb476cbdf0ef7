"""The CUDA devices of this machine, and FlashInfer's modules that were compiled with the image.

vLLM uses FlashInfer only where nvcc is on the PATH, or where VLLM_HAS_FLASHINFER_CUBIN is set.
FlashInfer looks for nvcc in CUDA_HOME first. An image has neither nvcc nor a C++ compiler
unless it was built to keep them (docs/build.md).
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving import arguments
from sparkforge.serving.errors import EX_UNAVAILABLE, StartError, say

Capability = tuple[int, int]
"""Compute capability of a device, major and minor: (12, 1) is a Spark's."""
_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CU_DEVICE_ATTRIBUTE_* of cuda.h


class DeviceError(StartError):
    """No device is visible; the message has a hint."""


def capabilities(library: str = "libcuda.so.1") -> list[Capability]:
    """Return the capability of each device, from the driver, without a context on the device."""
    cuda, devices = _devices(library)
    return [
        (_attribute(cuda, device, _MAJOR), _attribute(cuda, device, _MINOR)) for device in devices
    ]


def unified_bytes(library: str = "libcuda.so.1") -> int | None:
    """Return the memory of the first integrated device in bytes, as CUDA counts it, or None.

    An integrated device uses the host's memory.
    """
    cuda, devices = _devices(library)
    total = ctypes.c_size_t()
    for device in devices:
        if _attribute(cuda, device, _INTEGRATED) != 1:
            continue
        if cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0:
            return total.value
    return None


def _devices(library: str) -> tuple[Any, list[ctypes.c_int]]:
    """Return the driver and a handle of each device."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None, []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return cuda, []
    handles = [ctypes.c_int(-1) for _ in range(count.value)]
    for index, handle in enumerate(handles):
        cuda.cuDeviceGet(ctypes.byref(handle), index)  # after a failure its attributes fail, too
    return cuda, handles


def _attribute(cuda: Any, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return -1 if failed else value.value


def check(wanted: str, there: Sequence[Capability]) -> str | None:
    """Compare the devices with the image's target; vLLM's own error for no device has no hint.

    Args:
        wanted: the target's ``cuda_arch``, e.g. ``12.1``.
        there: of each visible device.

    Returns:
        A warning where all devices have another capability, which is untested; else None.

    Raises:
        DeviceError: no device is visible.
    """
    if not there:
        msg = (
            "no CUDA device is visible in this container. Compose requests it; docker run needs"
            " --gpus all. Both need NVIDIA's driver and container toolkit on the host: build.py"
            " doctor checks them"
        )
        raise DeviceError(msg, EX_UNAVAILABLE)
    names = [f"{major}.{minor}" for major, minor in there]
    if wanted in names:
        return None
    return f"this image is for devices of compute capability {wanted}, not {', '.join(names)}"


def driver(library: str = "libcuda.so.1", text: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the driver's release and its CUDA version.

    Raises:
        DeviceError: it cannot be read.
    """
    value = ctypes.c_int()
    try:
        if (code := ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(value))) != 0:
            raise OSError(f"cuDriverGetVersion ended with {code}")
        release = re.search(r"\s(\d+\.\d+[.\d]*)\s", text.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        msg = f"the driver's version cannot be read ({error}): build.py doctor checks the driver"
        raise DeviceError(msg, EX_UNAVAILABLE) from None
    cuda = f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"
    return f"{release[1]}, {cuda}" if release else cuda


# -- the pack of FlashInfer's modules --------------------------------------------------------------

PACKAGE = "flashinfer_jit_cache"
_KINDS = {
    "batch_prefill": "prefill",
    "xqa": "decode",
    "fused_moe": "experts",
    "mxfp8_quantization": "quantization",
    "sampling": "sampling",
}
"""By the start of a module's name."""
_KV_TYPES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""FlashInfer's names, by values of ``--kv-cache-dtype``; of all others BF16 is meant."""
_PAGES = (64, 32, 16)
"""Sizes of FlashInfer's pages on SM 12.x; the last is vLLM's block size by default."""
_REMEDY = "build an image that has them (docs/build.md)"


@dataclass(frozen=True)
class Pack:
    """The modules of an image."""

    architecture: str
    """As FlashInfer names it, e.g. ``sm121f``."""
    modules: tuple[str, ...]

    @classmethod
    def load(cls, manifest: Path) -> Pack:
        """Read a pack's manifest.

        Raises:
            OSError, ValueError: it cannot be read, or is not in the form that a build writes.
        """
        found = json.loads(manifest.read_bytes())
        try:
            return cls(found["architecture"], tuple(entry["name"] for entry in found["modules"]))
        except (LookupError, TypeError) as error:
            raise ValueError(f"{manifest}: {error!r}") from None

    def fits(self, device: Capability) -> bool:
        """Return whether a device loads this machine code: NVIDIA's rules (docs/kernels.md)."""
        found = re.fullmatch(r"sm(\d+)(\d)([af]?)", self.architecture)
        if found is None:
            return False
        major, minor = int(found[1]), int(found[2])
        if found[3] == "a":
            return device == (major, minor)
        return device[0] == major and device[1] >= minor

    def kinds(self) -> str:
        """Return the number of modules of each kind, in words."""
        names = (
            next((kind for start, kind in _KINDS.items() if module.startswith(start)), module)
            for module in self.modules
        )
        return ", ".join(f"{kind} {count}" for kind, count in Counter(names).items())


def installed() -> Pack | None:
    """Return the pack of this Python's FlashInfer; None: there is none of ours.

    Raises:
        OSError, ValueError: its manifest cannot be read.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (manifest := Path(folder) / "manifest.json").is_file():
            return Pack.load(manifest)
    return None


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Return whether a C++ compiler is on the PATH."""
    return any(shutil.which(name, path=environment.get("PATH")) for name in ("c++", "g++"))


def compiles(environment: Mapping[str, str]) -> bool:
    """Return whether FlashInfer can compile a module: it finds nvcc, and a C++ compiler."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    usual = shutil.which("nvcc", path=environment.get("PATH")) or "/usr/local/cuda/bin/nvcc"
    nvcc = environment.get("FLASHINFER_NVCC", f"{home}/bin/nvcc" if home else usual)
    return shutil.which(nvcc) is not None and has_compiler(environment)


def _needs(options: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the modules that options of ``vllm serve`` need: words, start and part of a name."""
    given = arguments.value(options, "--kv-cache-dtype") or ""
    cache = _KV_TYPES.get(given, "bf16")
    block = arguments.positive(options, "--block-size", _PAGES[-1])
    # vLLM cuts its blocks into the largest pages that FlashInfer has
    page = next((size for size in _PAGES if block % size == 0), block)
    words = [] if cache == "bf16" else [f"--kv-cache-dtype {given}"]
    words += [] if page == _PAGES[-1] else [f"--block-size {block}"]
    if attention_by_flashinfer(options):
        part = f"_kv_cache_{cache}_output_bf16_page_size_{page}_"
        yield " with ".join(words) or "attention by FlashInfer", "xqa_", part
        if arguments.has(options, "--speculative-config"):
            yield "--speculative-config", "xqa_", "_use_spec_dec_True_"
    if arguments.value(options, "--moe-backend") == "flashinfer_cutlass":
        yield "--moe-backend flashinfer_cutlass", "fused_moe_", ""


def attention_by_flashinfer(options: Sequence[str]) -> bool:
    """Return whether options of ``vllm serve`` name FlashInfer for attention."""
    return (arguments.value(options, "--attention-backend") or "").upper() == "FLASHINFER"


def check_pack(
    pack: Pack | None,
    devices: Sequence[Capability],
    options: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Check that FlashInfer has the modules for options of ``vllm serve``, or can compile them.

    FlashInfer itself fails only when the model is loaded.

    Raises:
        StartError: neither.
    """
    if compiles(environment):
        return
    if pack is None or not all(map(pack.fits, devices)):
        if attention_by_flashinfer(options):
            what = "no modules of FlashInfer" if pack is None else "none for this device"
            raise StartError(
                f"attention by FlashInfer: this image has {what}, and no nvcc and C++ compiler for"
                f" them; {_REMEDY}, or use --attention-backend TRITON_ATTN"
            )
        return
    for words, start, part in _needs(options):
        if not any(module.startswith(start) and part in module for module in pack.modules):
            raise StartError(
                f"{words}: this image lacks FlashInfer's module for it, and nvcc to compile it;"
                f" {_REMEDY}, or use other options"
            )


def pack_variables(
    pack: Pack | None, devices: Sequence[Capability], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the server's variables for a pack, and log its contents; the user's own stay.

    Without compilers FlashInfer's JIT is off: a module outside of the pack that ``check_pack`` does
    not know of then ends the start with MissingJITCacheError, not with a missing program.
    """
    if pack is None:
        return {}
    can_compile = compiles(environment)
    if not all(map(pack.fits, devices)):
        instead = "they are compiled here, which takes minutes"
        if not can_compile:
            instead = "without compilers there are none, so vLLM cannot use FlashInfer"
        say(
            f"warning: FlashInfer's modules in this image are for {pack.architecture}, not for this"
            f" device: {instead}"
        )
        return {}
    rest = "compiles others at their first use" if can_compile else "compiles no other"
    say(f"FlashInfer has modules for {pack.architecture} ({pack.kinds()}), and {rest}")
    chosen = {}
    if shutil.which("nvcc", path=environment.get("PATH")) is None:
        chosen["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    if not can_compile:
        chosen["FLASHINFER_DISABLE_JIT"] = "1"
    return {name: value for name, value in chosen.items() if name not in environment}
