"""NVIDIA's rules for the devices that run code for an architecture.

CUDA C++ programming guide, "Compute capabilities"; docs/kernels.md. Code for ``120`` and its family
form ``120f`` load on 12.0 and 12.1, code for ``120a`` on 12.0 only.
"""

from __future__ import annotations


def loads(code: str, device: str) -> bool:
    """Return whether a device loads machine code for an architecture.

    Args:
        code: e.g. ``120f``.
        device: compute capability, e.g. ``12.1``.
    """
    bare = code.rstrip("af")
    major, minor = int(bare[:-1]), int(bare[-1])
    ours, ours_minor = map(int, device.split("."))
    if code.endswith("a"):
        return (major, minor) == (ours, ours_minor)
    return major == ours and minor <= ours_minor


def compiles(ptx: str, device: str) -> bool:
    """Return whether a driver compiles PTX for an architecture to a device's machine code.

    Args:
        ptx: e.g. ``80``.
        device: compute capability, e.g. ``12.1``.
    """
    if not ptx.isdecimal():  # 90a, 120f: as machine code
        return loads(ptx, device)
    return int(ptx) <= int(device.replace(".", ""))
