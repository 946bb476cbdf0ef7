# SPDX-License-Identifier: Apache-2.0
"""Find the cubin of the device and launch its kernels through the driver."""

import ctypes
import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_sparkforge import contract, options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

CUBINS = Path(__file__).with_name("cubins")
"""Cubins and their ``manifest.json``; a build without them has no such folder."""

_ARCHITECTURES = {(9, 0): "90a", (12, 0): "120a", (12, 1): "121a"}
_SCHEMA = 1


class ManifestError(ValueError):
    """The files in ``CUBINS`` are not what the manifest says."""


def _architecture() -> str | None:
    """Return the architecture of the device's cubin, None if there can be none."""
    capability = current_platform.get_device_capability()
    if capability is None:
        return None
    return _ARCHITECTURES.get((capability.major, capability.minor))


def _manifest(architecture: str | None) -> dict[str, Any] | None:
    """Return the manifest's entry for an architecture, None if it has none.

    Raises:
        ManifestError: it cannot be read.

    """
    try:
        manifest = json.loads((CUBINS / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != _SCHEMA:
            raise ManifestError(
                f"{CUBINS / 'manifest.json'} has schema {manifest['schema']}, "
                f"this package reads {_SCHEMA}"
            )
        for entry in manifest["cubins"]:
            if entry["architecture"] == architecture:
                return entry
    except FileNotFoundError:
        pass
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as e:
        raise ManifestError(
            f"{CUBINS / 'manifest.json'} cannot be read: {type(e).__name__}: {e}"
        ) from e
    return None


def _read_cubin(entry: dict[str, Any]) -> bytes:
    """Return the bytes of a cubin.

    Raises:
        ManifestError: it is missing, or another one than the manifest says.

    """
    path = CUBINS / entry["file"]
    try:
        cubin = path.read_bytes()
    except OSError as e:
        raise ManifestError(f"{path} cannot be read: {e}") from e
    if hashlib.sha256(cubin).hexdigest() != entry["sha256"]:
        raise ManifestError(f"{path} is not the file that its manifest names")
    return cubin


@functools.cache
def unavailable() -> str | None:
    """Return why this build or this device has no decode kernels, None if it has.

    CUDA is not initialized.
    """
    if not current_platform.is_cuda():
        return "they need a CUDA device"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT needs one kernel for all numbers of rows"
    if envs.VLLM_LORA_ENABLE_DUAL_STREAM:
        return "VLLM_LORA_ENABLE_DUAL_STREAM has kernels that do not wait for those before them"
    architecture = _architecture()
    if architecture is None:
        return "there are none for this device's capability"
    try:
        entry = _manifest(architecture)
        if entry is None:
            return f"this wheel has no cubin for sm_{architecture}"
        _read_cubin(entry)
    except ManifestError as e:
        return str(e)
    if (
        importlib.util.find_spec("cuda") is None
        or importlib.util.find_spec("cuda.bindings") is None
    ):
        return "the package cuda-bindings is not installed"
    return None


def verify_option(config: "VllmConfig") -> None:
    """Raise if ``decode_kernels`` is ``on`` and that cannot be met."""
    if not is_required(config):
        return
    parts = contract.USED.keys() - options.of(config).off
    broken = (contract.broken(part) for part in sorted(parts))
    if reason := unavailable() or next(filter(None, broken), None):
        raise ValueError(f"decode_kernels is on: {reason}.")


def enabled(config: "VllmConfig | None", part: str) -> bool:
    """Whether options and device allow decode kernels; logs why not.

    Args:
        part: one of ``options.PARTS``.

    """
    if config is None:
        return False
    chosen = options.of(config)
    if chosen.decode_kernels == "off" or part in chosen.off:
        return False
    if (reason := unavailable()) is not None:
        if current_platform.is_cuda():
            logger.info_once("Decode kernels are off: %s.", reason)
        return False
    return contract.works(part)


def is_required(config: "VllmConfig | None") -> bool:
    """Whether a kernel that fails is an error."""
    return config is not None and options.of(config).decode_kernels == "on"


def fingerprint() -> str:
    """Return what the compile cache has to know of the kernels."""
    if unavailable() is not None:
        return ""
    entry = _manifest(_architecture())
    assert entry is not None
    return entry["sha256"]


# -- the operands of the kernels, as in kernels/csrc ----------------------------


class DenseOperands(ctypes.Structure):
    """dense_FORMAT_narrow_WARPS_ROWS and dense_FORMAT_wide_ROWS."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("factor", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
    ]


class ExpandOperands(ctypes.Structure):
    """expand_FORMAT."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("factor", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
    ]


class ExpertOperands(ctypes.Structure):
    """experts_gate_up_ROWS, experts_down_ROWS, and the same of experts_rows."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("padding", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("experts", ctypes.c_int),
    ]


class CombineOperands(ctypes.Structure):
    """experts_combine."""

    _fields_ = [
        ("experts", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    ]


class NormOperands(ctypes.Structure):
    """add_norm."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    ]


class RouteOperands(ctypes.Structure):
    """route."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    ]


class RotaryOperands(ctypes.Structure):
    """rotate_and_cache and rotate_and_cache_fp8."""

    _fields_ = [
        ("qkv", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("block_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("slot_stride", ctypes.c_longlong),
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("written", ctypes.c_int),
    ]


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == current_platform.device_type


def pointer(tensor: torch.Tensor | None, elements: int = 0) -> int | None:
    """Return the address of a tensor's element, None of no tensor."""
    if tensor is None:
        return None
    return tensor.data_ptr() + elements * tensor.element_size()


# -- launches --------------------------------------------------------------------------


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a driver function returned beside its error code."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None


@functools.cache
def _functions(device: int) -> dict[str, Any]:
    """Load the cubin of a device, all kernels of it: none may be loaded during the
    capture of a CUDA graph. ``torch`` must have a context on the device."""
    from cuda.bindings import driver

    entry = _manifest(_architecture())
    assert entry is not None
    module = _checked(driver.cuModuleLoadData(_read_cubin(entry)))
    attribute = driver.CUfunction_attribute
    functions = {}
    for kernel in entry["kernels"]:
        name = kernel["name"]
        function = _checked(driver.cuModuleGetFunction(module, name.encode()))
        _checked(driver.cuFuncLoad(function))
        static = _checked(
            driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        )
        _checked(
            driver.cuFuncSetAttribute(
                function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                max_shared_memory(device) - static,
            )
        )
        functions[name] = function
    return functions


@functools.cache
def max_shared_memory(device: int) -> int:
    """Bytes of shared memory that one block can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    name: str,
    grid: tuple[int, int],
    threads: int,
    shared: int,
    operands: ctypes.Structure,
    device: torch.device,
) -> None:
    """Launch a kernel on the current stream, so that it may begin while the kernel
    before it ends.

    Args:
        name: of the kernel.
        grid: blocks in x and y.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        operands: the kernel's only argument.
        device: of all tensors in it.

    Raises:
        KeyError: the cubin has no such kernel.
        RuntimeError: the driver refused it.

    """
    from cuda.bindings import driver

    function = _functions(device.index)[name]
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = [early], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(operands))
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0))
