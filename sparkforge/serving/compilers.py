"""Number of compilers that FlashInfer may run at once, next to a loaded model.

FlashInfer passes ``MAX_JOBS`` to ninja as ``-j`` (so do torch's and TVM's loaders of extensions).
Without it ninja starts one job more than there are CPUs, on a Spark 22. ninja itself reads no
variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sparkforge.serving import arguments, memory, packed
from sparkforge.serving.log import say
from sparkforge.serving.memory import GIB, Reading
from sparkforge.serving.profile import Profile

LARGEST_GIB = 8.0
"""One nvcc at the largest file of FlashInfer's MoE for SM 12.x: 7.7 was measured
(docs/evidence/machine-code.md). FlashInfer's other kernels of a gpt-oss server (attention,
sampling) took less than 0.5 where they were measured, for 12.1 with nvcc 13.0."""
USUAL_GIB = 2.0
KEEP_GIB = 4.0
"""For vLLM's own processes, which grow while they compile."""

PROGRAMS = frozenset(
    (
        "ninja",
        "nvcc",
        "cicc",
        "ptxas",
        "ptxas-blackwell",
        "cudafe++",
        "fatbinary",
        "nvlink",
        "gcc",
        "g++",
        "c++",
        "cc1",
        "cc1plus",
        "as",
        "collect2",
        "ld",
        "clang",
        "clang++",
    )
)
"""Names of compilers' processes."""


def gib_per_job(command: Sequence[str]) -> float:
    """Return the memory of one job: the most, unless another MoE than FlashInfer's is named."""
    moe = (arguments.value(command, "--moe-backend") or "auto").lower()
    return LARGEST_GIB if moe == "auto" or moe.startswith("flashinfer") else USUAL_GIB


def jobs(
    command: Sequence[str], reading: Reading, *, unified: bool, cpus: int | None = None
) -> int:
    """Return the number of compilers that may run at once: at least one, even if it does not fit.

    Args:
        reading: of memory before the server starts.
        unified: the server's share of memory is taken from the same memory.
        cpus: None: this machine's.
    """
    share = float(arguments.value(command, "--gpu-memory-utilization") or 0) if unified else 0.0
    # compilers count towards a container's limit, whether or not the GPU's memory does
    beside = min(reading.available - share * reading.total, reading.room)
    free = beside / GIB - KEEP_GIB
    most = len(os.sched_getaffinity(0)) if cpus is None else cpus
    return max(1, min(most, int(free / gib_per_job(command))))


def max_jobs(
    profile: Profile, command: Sequence[str], own: int | None, environment: Mapping[str, str]
) -> int:
    """Return ``MAX_JOBS`` for a server: the user's own number, else what fits; logs the latter.

    A profile without a memory plan is for a card with its own memory.
    """
    if own is not None:
        return own
    count = jobs(command, memory.read(), unified=profile.memory is not None)
    # FlashInfer compiles nothing for a CPU, nor without compilers
    if profile.cuda_arch is not None and packed.compiles(environment):
        say(
            f"kernels are compiled with MAX_JOBS={count}, at {gib_per_job(command):.1f} GiB each of"
            " the memory beside the model"
        )
    return count
