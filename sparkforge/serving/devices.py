"""Which CUDA devices are there, and are they those that the image is for?"""

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
    """There is none; the message says what to do."""


_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CU_DEVICE_ATTRIBUTE_* of cuda.h


def capabilities(library: str = "libcuda.so.1") -> list[Capability]:
    """Ask the driver; it makes no context, so it takes no memory of the device."""
    cuda, devices = _devices(library)
    return [(_attribute(cuda, one, _MAJOR), _attribute(cuda, one, _MINOR)) for one in devices]


def unified_bytes(library: str = "libcuda.so.1") -> int | None:
    """Return the memory of the first integrated device, which is the host's, as CUDA counts it.

    None: no device is integrated.
    """
    cuda, devices = _devices(library)
    total = ctypes.c_size_t()
    for one in devices:
        if _attribute(cuda, one, _INTEGRATED) != 1:
            continue
        if cuda.cuDeviceTotalMem_v2(ctypes.byref(total), one) == 0:
            return total.value
    return None


def _devices(library: str) -> tuple[Any, list[ctypes.c_int]]:
    """Return the driver and a handle of each device; none where the driver has none to show."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None, []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return cuda, []
    found = [ctypes.c_int(-1) for _ in range(count.value)]
    for index, one in enumerate(found):
        cuda.cuDeviceGet(ctypes.byref(one), index)  # where it fails, so does each question after it
    return cuda, found


def _attribute(cuda: Any, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return -1 if failed else value.value


def check(wanted: str, there: Sequence[Capability]) -> str | None:
    """Compare with what the image is for; vLLM's own words for no device at all name no remedy.

    Args:
        wanted: the target's ``cuda_arch``, e.g. ``12.1``.
        there: of each device that the driver shows here.

    Returns:
        A warning, where there are others only: nobody has tried that.

    Raises:
        DeviceError: no device is there.
    """
    if not there:
        msg = (
            "no CUDA device is to be seen in here. Compose asks for it; docker run needs --gpus"
            " all, and both need NVIDIA's driver and container toolkit on the host: build.py"
            " doctor says which is missing"
        )
        raise DeviceError(msg, EX_UNAVAILABLE)
    names = [f"{major}.{minor}" for major, minor in there]
    if wanted in names:
        return None
    return f"this image is for devices of compute capability {wanted}, not {', '.join(names)}"


def driver(library: str = "libcuda.so.1", text: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the driver's version: its release, and the CUDA that it is for.

    Raises:
        DeviceError: it cannot be read.
    """
    value = ctypes.c_int()
    try:
        if (code := ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(value))) != 0:
            raise OSError(f"cuDriverGetVersion ended with {code}")
        release = re.search(r"\s(\d+\.\d+[.\d]*)\s", text.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        msg = f"the driver's version cannot be read ({error}): build.py doctor says what is wrong"
        raise DeviceError(msg, EX_UNAVAILABLE) from None
    cuda = f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"
    return f"{release[1]}, {cuda}" if release else cuda
