"""Number of compilers that run at once: as many as fit in memory."""

import os

from sparkforge.serving import memory

NVCC_GIB = 8.9
"""Memory counted for one nvcc: the largest file measured, one of vLLM's; most take less than 1
(docs/build.md). FlashInfer's largest takes 7.6 (docs/evidence/machine-code.md)."""
CXX_GIB = 2.0
"""Memory counted for one g++; the C++ files of vLLM that were compiled here took less than 1."""
KEEP_GIB = 4.0
"""Memory that a compile leaves to the rest of the machine."""


def width(asked: int | None, gib_per_job: float, keep_gib: float = 0.0) -> int:
    """Return the number of jobs of a size to run at once: limited by memory and by CPUs.

    Args:
        asked: the user's number, which counts as it is.
        gib_per_job, keep_gib: memory that one takes at most, and that stays free.
    """
    if asked is not None:
        return asked
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, int((available_gib() - keep_gib) / gib_per_job)))


def available_gib() -> float:
    """Return the available memory of this machine, or of the container that this runs in."""
    return memory.read().room / memory.GIB
