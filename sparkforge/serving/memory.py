"""How much of a unified memory vLLM may take: what the host has available decides.

On a Spark, GPU and host share one memory. vLLM's ``--gpu-memory-utilization`` is a share of all of
it, fixed before anybody knows what else runs. vLLM refuses to start where that share is not
available; a share that just fits leaves nothing to the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving.errors import StartError

GIB = 1 << 30
HOST_GIB = 16
"""The least limit of a container whose GPU memory does not count in it.

Counted there are vLLM's own processes (3 GiB or more, an estimate), FlashInfer's compilers (4.6:
ten of 0.46, measured with nvcc 13.0 for 12.1) and Compose's two folders in memory, 8 of /dev/shm
and 2 of /tmp, which are hardly full at the same time. No Spark has confirmed it.
"""
LIMIT = "SPARKFORGE_MEMORY_LIMIT"
_GROUP = "sys/fs/cgroup"


class MemoryShortError(StartError):
    """The model cannot fit; the message says by how much, and what to do."""


@dataclass(frozen=True)
class Reading:
    """Bytes of the machine's memory, and of them, bytes that can be had now.

    Attributes:
        limit: bytes that this container may use; None: it has no limit.
        used: bytes of them in use that the kernel cannot drop.
    """

    total: int
    available: int
    limit: int | None = None
    used: int = 0

    @property
    def left(self) -> int | None:
        """Bytes up to the container's limit; None: it has no limit."""
        return None if self.limit is None else max(self.limit - self.used, 0)

    @property
    def room(self) -> int:
        """Bytes that processes of this container can have now."""
        return self.available if self.left is None else min(self.available, self.left)


def read(root: Path = Path("/")) -> Reading:
    """Read the kernel's own estimate, and the limit of this container.

    ``MemAvailable`` counts page cache that can be dropped as available; cudaMemGetInfo does not.
    Of the container's use, its page cache does not count here either.

    Raises:
        OSError, ValueError, LookupError: no such file or line; not a Linux of the last ten years.
    """
    have = meminfo((root / "proc/meminfo").read_text(encoding="ascii", errors="replace"))
    total, available = have["MemTotal"], have["MemAvailable"]
    figures = group(root)
    if "max" not in figures:
        return Reading(total, available)
    stat = dict(ln.split() for ln in (root / _GROUP / "memory.stat").read_text().splitlines())
    # these two lists hold files alone: what lies in /tmp and /dev/shm is in others
    cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return Reading(total, available, figures["max"], max(figures["current"] - cache, 0))


def meminfo(text: str) -> dict[str, int]:
    """Return /proc/meminfo in bytes by name; {} where the text is none."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def group(root: Path) -> dict[str, int]:
    """Return ``current``, ``peak`` and ``max`` of this container in bytes; without those not there.

    ``max`` is not there where no limit is set.

    Raises:
        OSError, ValueError: a file is there and cannot be read, or holds no number.
    """
    files = {name: root / _GROUP / f"memory.{name}" for name in ("current", "peak", "max")}
    texts = {
        name: file.read_text(encoding="ascii").strip()
        for name, file in files.items()
        if file.is_file()
    }
    return {name: int(text) for name, text in texts.items() if text != "max"}


def utilisation(plan: Mapping[str, Any], reading: Reading, cuda_total: int | None = None) -> float:
    """Return the share of all memory for vLLM, in whole percents, rounded down.

    Where the GPU is integrated, its memory does not count in a container's limit: others measured
    that on a GB10 (12 GiB of cudaMalloc under a limit of 8 count as 0.4). So the limit has to leave
    the host's part there, and changes no share.

    Args:
        plan: ``keep_free_gib`` left to the host, ``most_percent`` of all memory at most,
            ``least_gib`` without which the model does not fit.
        cuda_total: bytes of an integrated GPU's memory as CUDA counts them, which vLLM multiplies
            by the share; None: no GPU is integrated.

    Raises:
        MemoryShortError: less than ``least_gib`` can be had, or the limit is too small.
    """
    keep, least = int(plan["keep_free_gib"]) * GIB, int(plan["least_gib"]) * GIB
    if cuda_total is not None and reading.limit is not None and reading.limit < HOST_GIB * GIB:
        msg = (
            f"the container's memory limit is {reading.limit / GIB:.1f} GiB, and the server's host"
            f" part needs {HOST_GIB} (the GPU's part does not count in it): set {LIMIT}={HOST_GIB}g"
            " or more"
        )
        raise MemoryShortError(msg)
    there = reading.room if cuda_total is None else reading.available
    total = cuda_total or reading.total
    percent = min((there - keep) * 100 // total, int(plan["most_percent"]))
    if total * percent // 100 >= least:
        return percent / 100
    needs = (
        f"{plan['keep_free_gib']} are kept for the system, and the model needs {plan['least_gib']}"
    )
    if there < reading.available:
        assert reading.limit is not None
        msg = (
            f"the container's memory limit of {reading.limit / GIB:.1f} GiB leaves"
            f" {there / GIB:.1f} of the {reading.available / GIB:.1f} GiB that are available;"
            f" {needs}: raise {LIMIT}"
        )
    else:
        msg = (
            f"{there / GIB:.1f} of {reading.total / GIB:.1f} GiB are available; {needs}: end other"
            " programs that hold memory (free -h, ps aux --sort=-rss)"
        )
    raise MemoryShortError(
        f"{msg}, or give a share of your own in SPARKFORGE_GPU_MEMORY_UTILIZATION"
    )


def described(reading: Reading, cuda_total: int | None) -> str:
    """Say what the share was computed from; ``cuda_total`` is as in ``utilisation``."""
    there = reading.room if cuda_total is None else reading.available
    words = [f"{there / GIB:.1f} of {reading.total / GIB:.1f} GiB are available"]
    if cuda_total is not None:
        words.append(f"CUDA counts {cuda_total / GIB:.1f} for its integrated device")
    if reading.limit is not None:
        counts = "" if cuda_total is None else " of host memory"
        words.append(f"the container's limit is {reading.limit / GIB:.1f}{counts}")
    return ", ".join(words)
