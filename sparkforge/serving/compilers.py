"""How many compilers FlashInfer may run at once, beside a loaded model: as many as memory holds.

FlashInfer hands ``MAX_JOBS`` to ninja as ``-j`` (so do torch's and TVM's loaders of extensions);
without it ninja starts a job more than there are CPUs, on a Spark 22. ninja itself reads no
variable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sparkforge.serving import profile
from sparkforge.serving.memory import GIB, Reading

LARGEST_GIB = 10.4
"""One nvcc at the largest file that anybody measured, of FlashInfer's MoE for SM 12.x
(docs/proofs.md). What else of FlashInfer a gpt-oss server compiles (attention, sampling) took less
than 0.5 where it was measured, for 12.1 with nvcc 13.0."""
USUAL_GIB = 2.0
KEEP_GIB = 4.0
"""For vLLM's own processes: they grow while they compile."""


def gib_per_job(command: Sequence[str]) -> float:
    """Return what one job is counted at: the most, unless the MoE is named and not FlashInfer's."""
    moe = (profile.value(command, "--moe-backend") or "auto").lower()
    return LARGEST_GIB if moe == "auto" or moe.startswith("flashinfer") else USUAL_GIB


def jobs(
    command: Sequence[str], reading: Reading, *, unified: bool, cpus: int | None = None
) -> int:
    """Return how many compilers may run at once; at least one, whether or not it fits.

    Args:
        reading: of memory before the server starts.
        unified: the server's share of memory is taken from that.
        cpus: of this machine, where it is None.
    """
    share = float(profile.value(command, "--gpu-memory-utilization") or 0) if unified else 0.0
    # compilers count in a container's limit, whether or not the GPU's memory does
    beside = min(reading.available - share * reading.total, reading.room)
    free = beside / GIB - KEEP_GIB
    most = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return max(1, min(most, int(free / gib_per_job(command))))
