"""Which CUDA devices are there, and are they those that the image is for?"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from sparkforge.serving.errors import EX_UNAVAILABLE, StartError

Capability = tuple[int, int]
"""Compute capability of a device, major and minor: (12, 1) is a Spark's."""


class DeviceError(StartError):
    """There is none; the message says what to do."""


def capabilities(library: str = "libcuda.so.1") -> list[Capability]:
    """Ask the driver; it makes no context, so it takes no memory of the device."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return []
    count, value, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            code = cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetAttribute(
                ctypes.byref(value), attribute, device
            )
            numbers.append(-1 if code else value.value)
        found.append((numbers[0], numbers[1]))
    return found


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
