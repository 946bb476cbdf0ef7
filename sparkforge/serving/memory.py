"""Memory on a machine where GPU and host share it: vLLM's share, the page cache, the guard.

A machine that runs out of it is reported to hang until a power cycle: the server gives way before.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.serving import devices, options
from sparkforge.serving.options import EX_OSERR, StartError, say

if TYPE_CHECKING:
    from sparkforge.serving.door import Door
    from sparkforge.serving.profile import MemoryPlan

GIB = 1 << 30
HOST_GIB = 16  # smallest limit of a container: vLLM 3 or more, compilers 4.6, /dev/shm 8, /tmp 2
LIMIT, SHARE = "SPARKFORGE_MEMORY_LIMIT", "--gpu-memory-utilization"


@dataclass(frozen=True)
class Reading:
    """Memory of the machine and of the container, in bytes."""

    total: int
    available: int
    limit: int | None = None  # of this container; None: no limit
    used: int = 0  # used part of the limit, without pages that the kernel can drop

    @property
    def room(self) -> int:
        """Bytes that processes of this container can get now."""
        limit = self.available if self.limit is None else self.limit - self.used
        return max(min(self.available, limit), 0)


def read(root: Path = Path("/")) -> Reading:
    """Read the kernel's own estimate, which counts droppable page cache, and our limit."""
    have = meminfo((root / "proc/meminfo").read_text())
    group = root / "sys/fs/cgroup"  # a container's own is at the top; version 2
    limit, used, file = None, 0, group / "memory.max"
    if file.is_file() and (text := file.read_text().strip()) != "max":
        limit, used = int(text), int((group / "memory.current").read_text())
        # these two lists hold files only: /tmp and /dev/shm are in others
        lists = re.findall(r"active_file (\d+)", (group / "memory.stat").read_text())
        used -= sum(map(int, lists))
    return Reading(have["MemTotal"], have["MemAvailable"], limit, max(used, 0))


def meminfo(text: str) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes, by name; other lines are skipped."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def utilisation(
    plan: MemoryPlan, reading: Reading, cuda_total: int | None = None, machines: int = 1
) -> float:
    """Return vLLM's share of all memory, ``cuda_total`` where that is given; whole percents."""
    text = described(reading, cuda_total)
    if reading.limit is not None and reading.limit < HOST_GIB * GIB:
        msg = f"{text}, and the server's host part needs {HOST_GIB}: set {LIMIT}={HOST_GIB}g"
        raise StartError(f"{msg} or more (the GPU's part does not count in it)")
    least_gib, total = -(-plan.least_gib // machines), cuda_total or reading.total
    free = reading.available - plan.keep_free_gib * GIB
    percent = min(free * 100 // total, plan.most_percent)
    if total * percent // 100 >= least_gib * GIB:
        return percent / 100
    raise StartError(
        f"{text}; {plan.keep_free_gib} are kept for the system, and the model needs {least_gib}:"
        " end other programs that use memory (free -h, ps aux --sort=-rss), or set your own share"
        f" with {SHARE} in SPARKFORGE_EXTRA_ARGS"
    )


def described(reading: Reading, cuda_total: int | None = None) -> str:
    """Describe the inputs of the share."""
    text = f"{reading.available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available"
    if cuda_total is not None:
        text += f", CUDA counts {cuda_total / GIB:.1f} for its integrated device"
    if reading.limit is not None:
        text += f", the container's limit is {reading.limit / GIB:.1f}"
    return text


def share(plan: MemoryPlan | None, caller: Sequence[str], machines: int) -> list[str]:
    """Return the options for vLLM's share of memory; a user's own is left alone."""
    own = (SHARE, "--device-memory-utilization", "--kv-cache-memory-bytes")
    if plan is None or any(options.has(caller, option) for option in own):
        return []
    reading, cuda_total = read(), devices.unified_bytes()
    computed = f"{utilisation(plan, reading, cuda_total, machines):.2f}"
    say(f"{described(reading, cuda_total)}: {SHARE} {computed}")
    return [SHARE, computed]


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache, which a GPU on unified memory cannot use until then."""
    try:
        for file in files:
            with file.open("rb") as opened:
                os.fdatasync(opened.fileno())  # pages that are not on the disk yet stay
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if files:
            say(f"page cache: {sum(file.stat().st_size for file in files) / 1e9:.1f} GB dropped")
    except OSError as error:
        say(f"warning: the weights stay in the page cache: {error}")


# below these the guard warns, refuses new requests and ends the server: an estimate
WARN_GIB, REFUSE_GIB, END_GIB = 6.0, 4.0, 2.0
END_S = 10.0  # below the third; the others act at once
_RELEASE = 1.25  # times the first: above it memory is no longer short


@dataclass
class Guard:
    """Acts on the memory that is left: the machine's, or up to the container's limit."""

    acts: bool = True  # false: it only warns
    entrance: Door | None = None  # refuses new requests, or no longer
    read: Callable[[], Reading] = read
    _told: str = ""
    _low_since: float | None = None

    def begin(self) -> None:
        """Lock this process' pages in memory, which a machine without memory would drop first."""
        # beyond a limit on locked memory allocations would fail
        if self.acts and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
            ctypes.CDLL(None).mlockall(7)  # MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT

    def look(self, now: float) -> None:
        """Read memory and act, at ``now`` of the monotonic clock; StartError: end the server."""
        reading = self.read()
        room, text = reading.room / GIB, f"memory is short: {described(reading)}"
        if room >= END_GIB:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif self.acts and now - self._low_since >= END_S:
            msg = f"{text}: ending the server before the machine stops responding"
            raise StartError(msg, EX_OSERR)
        state, text = self._told, f"warning: {text}"
        if room > WARN_GIB * _RELEASE:
            state, text = "", f"memory is no longer short: {described(reading)}"
        elif self.acts and room < REFUSE_GIB:
            state, text = "refuses", f"{text}: new requests are refused"
        elif room < WARN_GIB and not state:
            state = "warned"
        if state != self._told:
            say(text)
            if self.entrance is not None:
                self.entrance.refuse(state == "refuses")
            self._told = state
