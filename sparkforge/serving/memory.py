"""Memory on a machine where GPU and host share it: vLLM's share, the page cache, log lines.

vLLM's ``--gpu-memory-utilization`` is a share of all memory, fixed before the use of other programs
is known. vLLM refuses to start where that share is not available, and a share that just fits leaves
nothing to the host. So the entrypoint computes it from the memory that is available.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.serving import arguments, devices
from sparkforge.serving.errors import StartError, say

if TYPE_CHECKING:
    from sparkforge.serving.profile import MemoryPlan, Profile

GIB = 1 << 30
HOST_GIB = 16
"""The smallest limit of a container whose GPU memory does not count towards it.

The limit covers vLLM's own processes (3 GiB or more, an estimate), FlashInfer's compilers (4.6:
ten of 0.46, measured with nvcc 13.0 for 12.1) and Compose's two folders in memory: 8 for /dev/shm
and 2 for /tmp, which are rarely full at the same time. Not confirmed on a Spark.
"""
LIMIT = "SPARKFORGE_MEMORY_LIMIT"
SHARE = "--gpu-memory-utilization"
_OTHER_SHARES = ("--device-memory-utilization", "--kv-cache-memory-bytes")


class MemoryShortError(StartError):
    """The model does not fit; the message says by how much, and has a hint."""


@dataclass(frozen=True)
class Reading:
    """Memory of the machine and of the container, in bytes."""

    total: int
    available: int
    limit: int | None = None
    """Of this container or control group; None: no limit."""
    used: int = 0
    """Used part of the limit, without pages that the kernel can drop."""

    @property
    def room(self) -> int:
        """Bytes that processes of this container or control group can get now."""
        if self.limit is None:
            return self.available
        return min(self.available, max(self.limit - self.used, 0))


def read(root: Path = Path("/")) -> Reading:
    """Read the kernel's own estimate, and the limit of this container or control group.

    ``MemAvailable`` counts page cache that can be dropped as available; cudaMemGetInfo does not.
    The container's page cache does not count as used either. Of several limits, one inside of the
    other, the one with the least room counts.

    Raises:
        OSError, ValueError, LookupError: a file or line is missing; not a Linux of the last ten
            years.
    """
    have = meminfo((root / "proc/meminfo").read_text(encoding="ascii", errors="replace"))
    total, available = have["MemTotal"], have["MemAvailable"]
    limits = list(_limits(root / "sys/fs/cgroup", root / "proc/self/cgroup"))
    if not limits:
        return Reading(total, available)
    return Reading(total, available, *min(limits, key=lambda limit: limit[0] - limit[1]))


def meminfo(text: str) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes, by name; other lines are skipped."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _limits(top: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of our control group (version 2) and of those above it."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    # a container's own group is at the top, whatever its path is outside
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = top / path.lstrip("/")
    for group in (folder, *folder.parents):
        limit = group / "memory.max"
        if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # these two lists hold files only: /tmp and /dev/shm are in others
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            used = int((group / "memory.current").read_text(encoding="ascii"))
            yield int(text), max(used - cached, 0)
        if group == top:
            break


def utilisation(plan: MemoryPlan, reading: Reading, cuda_total: int | None = None) -> float:
    """Return the share of all memory for vLLM, in whole percents, rounded down.

    Memory of an integrated GPU does not count towards a container's limit: others measured that on
    a GB10 (12 GiB of cudaMalloc under a limit of 8 count as 0.4). So there the limit has to leave
    room for the host's part, and does not change the share.

    Args:
        cuda_total: bytes of an integrated GPU's memory as CUDA counts them, which vLLM multiplies
            by the share; None: no GPU is integrated.

    Raises:
        MemoryShortError: less than ``least_gib`` is available, or the limit is too small.
    """
    keep, least = plan.keep_free_gib * GIB, plan.least_gib * GIB
    if cuda_total is not None and reading.limit is not None and reading.limit < HOST_GIB * GIB:
        msg = (
            f"the container's memory limit is {reading.limit / GIB:.1f} GiB, and the server's host"
            f" part needs {HOST_GIB} (the GPU's part does not count in it): set {LIMIT}={HOST_GIB}g"
            " or more"
        )
        raise MemoryShortError(msg)
    available = reading.room if cuda_total is None else reading.available
    total = cuda_total or reading.total
    percent = min((available - keep) * 100 // total, plan.most_percent)
    if total * percent // 100 >= least:
        return percent / 100
    remedy = "end other programs that use memory (free -h, ps aux --sort=-rss)"
    if available < reading.available:
        remedy = f"raise {LIMIT}"
    msg = (
        f"{described(reading, cuda_total)}; {plan.keep_free_gib} are kept for the system, and the"
        f" model needs {plan.least_gib}: {remedy}, or set your own share with {SHARE} in"
        " SPARKFORGE_EXTRA_ARGS"
    )
    raise MemoryShortError(msg)


def described(reading: Reading, cuda_total: int | None) -> str:
    """Describe the inputs of the share; ``cuda_total`` is as in ``utilisation``."""
    available = reading.room if cuda_total is None else reading.available
    parts = [f"{available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available"]
    if cuda_total is not None:
        parts.append(f"CUDA counts {cuda_total / GIB:.1f} for its integrated device")
    if reading.limit is not None:
        host = "" if cuda_total is None else " of host memory"
        parts.append(f"the container's limit is {reading.limit / GIB:.1f}{host}")
    return ", ".join(parts)


def options(plan: MemoryPlan | None, caller: Sequence[str], machines: int) -> tuple[list[str], str]:
    """Return the options for vLLM's share of memory.

    Args:
        plan: None: vLLM's own share.
        caller: the user's options; one that sets the share is left alone.
        machines: that the weights are split over.

    Returns:
        Options, and a description of the computation; "" where nothing was computed.

    Raises:
        MemoryShortError: the model does not fit.
    """
    if plan is None or any(arguments.has(caller, option) for option in (SHARE, *_OTHER_SHARES)):
        return [], ""
    reading, cuda_total = read(), devices.unified_bytes()
    computed = f"{utilisation(plan.split(machines), reading, cuda_total):.2f}"
    return [SHARE, computed], f"{described(reading, cuda_total)}: {SHARE} {computed}"


# -- log lines -------------------------------------------------------------------------------------

PREFIX = "memory at "
_FIELDS = {
    "MemTotal": "total",
    "MemAvailable": "available",
    "MemFree": "free",
    "Cached": "cached",
    "Shmem": "shared",
}


def line(moment: str, root: Path = Path("/")) -> str:
    """Return the memory of machine and container in GiB; an error is part of the line.

    With unified memory, model, page cache, kernels and programs share the same bytes. Their parts
    change from stage to stage, and cannot be measured afterwards.

    Args:
        moment: a stage, e.g. ``first token``.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
        have, reading = meminfo(text), read(root)
    except (OSError, ValueError, LookupError) as error:
        return f"{PREFIX}{moment}: cannot be read: {error}"
    found = {word: have[name] for name, word in _FIELDS.items() if name in have}
    if reading.limit is not None:
        found |= {"container": reading.used, "limit": reading.limit}
    parts = [f"{word} {size / GIB:.2f}" for word, size in found.items()]
    return f"{PREFIX}{moment}, GiB: {', '.join(parts)}"


# -- the page cache --------------------------------------------------------------------------------


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache and log the result; a failure only costs memory.

    On unified memory the GPU cannot use a page of a cached weight file before the kernel has
    reclaimed it. Dropping all caches needs root; ``posix_fadvise(DONTNEED)`` drops the clean,
    unmapped pages of a readable file.
    """
    try:
        for file in files:
            with file.open("rb") as opened:
                os.fdatasync(opened.fileno())  # pages that are not on the disk yet stay
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size, left = sum(file.stat().st_size for file in files), sum(map(resident, files))
    except OSError as error:
        say(f"warning: the weights stay in the page cache: {error}")
        return
    say(f"page cache: {size / 1e9:.1f} GB of weights dropped, {left / 1e9:.1f} GB remain")


def resident(file: Path) -> int:
    """Return the bytes of a file in the page cache, in whole pages.

    Raises:
        OSError: it cannot be read, or the kernel gives no answer.
    """
    if (size := file.stat().st_size) == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    flags = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    with file.open("rb") as opened:
        # Python's own mmap gives no address without write access
        start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
        if start == ctypes.c_void_p(-1).value:
            raise OSError(number := ctypes.get_errno(), os.strerror(number), str(file))
        code = libc.mincore(start, size, flags)
        libc.munmap(start, size)
    if code != 0:
        raise OSError(f"mincore of {file} failed")
    return sum(flag & 1 for flag in flags.raw) * mmap.PAGESIZE


# -- compilers -------------------------------------------------------------------------------------

LARGEST_GIB, USUAL_GIB, KEEP_GIB = 8.0, 2.0, 4.0
"""One nvcc at the largest file of FlashInfer's MoE for SM 12.x (7.7 was measured:
docs/evidence/machine-code.md), at any other, and what vLLM's own processes need while they
compile."""


def max_jobs(profile: Profile, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return ``MAX_JOBS`` for a server: the user's own, else as many compilers as fit.

    FlashInfer passes it to ninja, which would start one job more than there are CPUs. An image
    without compilers starts none.
    """
    if environment.get("MAX_JOBS"):
        return environment["MAX_JOBS"]
    reading = read()
    # without a memory plan the profile is for a card with its own memory
    share = float(arguments.value(command, SHARE) or 0) if profile.memory is not None else 0.0
    beside = min(reading.available - share * reading.total, reading.room)
    moe = (arguments.value(command, "--moe-backend") or "auto").lower()
    each = LARGEST_GIB if moe == "auto" or moe.startswith("flashinfer") else USUAL_GIB
    count = min(len(os.sched_getaffinity(0)), int((beside / GIB - KEEP_GIB) / each))
    return str(max(1, count))
