"""How much of a unified memory vLLM may take: what the host has available decides.

On a Spark, GPU and host share one memory. vLLM's ``--gpu-memory-utilization`` is a share of all of
it, fixed before anybody knows what else runs. vLLM refuses to start where that share is not
available; a share that just fits leaves nothing to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving.errors import StartError

GIB = 1 << 30


class MemoryShortError(StartError):
    """The model cannot fit; the message says by how much, and what to do."""


@dataclass(frozen=True)
class Reading:
    """Bytes of the machine's memory, and of them, bytes that can be had now."""

    total: int
    available: int


def read(root: Path = Path("/")) -> Reading:
    """Read the kernel's own estimate, and the limit of this container where it is tighter.

    ``MemAvailable`` counts page cache that can be dropped as available; cudaMemGetInfo does not.

    Raises:
        OSError, KeyError: no such file or line; not a Linux of the last ten years.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        stat = dict(ln.split() for ln in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        available = min(available, max(int(text) - used, 0))
    return Reading(total, available)


def utilisation(plan: Mapping[str, Any], reading: Reading) -> float:
    """Return the share of all memory for vLLM, in whole percents, rounded down.

    Args:
        plan: ``keep_free_gib`` left to the host, ``most_percent`` of all memory at most,
            ``least_gib`` without which the model does not fit.

    Raises:
        MemoryShortError: less than ``least_gib`` can be had.
    """
    keep, least = int(plan["keep_free_gib"]) * GIB, int(plan["least_gib"]) * GIB
    percent = (reading.available - keep) * 100 // reading.total
    percent = min(percent, int(plan["most_percent"]))
    if reading.total * percent // 100 < least:
        msg = (
            f"{reading.available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available;"
            f" {plan['keep_free_gib']} are kept for the system, and the model needs"
            f" {plan['least_gib']}: end other programs that hold memory (free -h, ps aux"
            " --sort=-rss), or give a share of your own in SPARKFORGE_GPU_MEMORY_UTILIZATION"
        )
        raise MemoryShortError(msg)
    return percent / 100
