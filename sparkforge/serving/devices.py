"""The CUDA devices of this machine, compared with the image's target."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkforge.serving.errors import EX_UNAVAILABLE, StartError

Capability = tuple[int, int]
"""Compute capability of a device, major and minor: (12, 1) is a Spark's."""


class DeviceError(StartError):
    """No device is visible; the message has a hint."""


_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CU_DEVICE_ATTRIBUTE_* of cuda.h


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
