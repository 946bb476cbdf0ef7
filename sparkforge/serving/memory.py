"""Memory that vLLM may use on a machine where GPU and host share it.

vLLM's ``--gpu-memory-utilization`` is a share of all memory, fixed before the use of other programs
is known. vLLM refuses to start where that share is not available, and a share that just fits leaves
nothing to the host. So the entrypoint computes it from the memory that is available.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge.serving import arguments, devices
from sparkforge.serving.errors import StartError

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
_GROUP = "sys/fs/cgroup"


@dataclass(frozen=True)
class _Names:
    """Files of a control group, which has them by version.

    Attributes:
        mount: folder of the memory controller, below ``_GROUP``.
        cache: of ``memory.stat``: page cache, bytes.
    """

    mount: str
    limit: str
    current: str
    peak: str
    cache: tuple[str, ...]


_V2 = _Names("", "memory.max", "memory.current", "memory.peak", ("inactive_file", "active_file"))
_V1 = _Names(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_NO_LIMIT = 1 << 60  # how version 1 writes none: 2**63, less a page


class MemoryShortError(StartError):
    """The model does not fit; the message says by how much, and has a hint."""


@dataclass(frozen=True)
class MemoryPlan:
    """A profile's plan for a memory that GPU and host share."""

    keep_free_gib: int
    """Left to the host."""
    most_percent: int
    """Of all memory, at most."""
    least_gib: int
    """The model does not fit into less."""

    def split(self, machines: int) -> MemoryPlan:
        """Return the plan of each of several machines that hold the model together."""
        return replace(self, least_gib=-(-self.least_gib // machines))


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
    def left(self) -> int | None:
        """Bytes up to the limit; None: no limit."""
        return None if self.limit is None else max(self.limit - self.used, 0)

    @property
    def room(self) -> int:
        """Bytes that processes of this container or control group can get now."""
        return self.available if self.left is None else min(self.available, self.left)


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
    limits = list(_limits(root))
    if not limits:
        return Reading(total, available)
    return Reading(total, available, *min(limits, key=lambda limit: limit[0] - limit[1]))


def meminfo(text: str) -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes, by name; other lines are skipped."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def group(root: Path) -> dict[str, int]:
    """Return ``current``, ``peak`` and ``max`` of this container in bytes, as far as they exist.

    Without a limit there is no ``max``.

    Raises:
        OSError, ValueError: a file exists and cannot be read, or holds no number.
    """
    return _figures(root / _GROUP, _V2)


def _figures(folder: Path, names: _Names) -> dict[str, int]:
    files = {"current": names.current, "peak": names.peak, "max": names.limit}
    texts = {
        name: (folder / file).read_text(encoding="ascii").strip()
        for name, file in files.items()
        if (folder / file).is_file()
    }
    figures = {name: int(text) for name, text in texts.items() if text != "max"}
    return {name: size for name, size in figures.items() if size < _NO_LIMIT}


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of our control group and of those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    # a container may have files of version 2 on a host that names its controllers by version 1
    mounted = (root / _GROUP / _V1.mount).is_dir()
    old = next((names for names in paths if mounted and "memory" in names.split(",")), None)
    version = _V2 if old is None else _V1
    top = root / _GROUP / version.mount
    # a container's own group is at the top, whatever its path is outside
    own = top / paths.get(old or "", "/").lstrip("/")
    for folder in (own, *own.parents):
        figures = _figures(folder, version)
        if "max" in figures:
            stat = dict(ln.split() for ln in (folder / "memory.stat").read_text().splitlines())
            # these two lists hold files only: /tmp and /dev/shm are in others
            cache = sum(int(stat.get(name, 0)) for name in version.cache)
            yield figures["max"], max(figures["current"] - cache, 0)
        if folder == top:
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
    needs = f"{plan.keep_free_gib} are kept for the system, and the model needs {plan.least_gib}"
    if available < reading.available:
        assert reading.limit is not None
        msg = (
            f"the container's memory limit of {reading.limit / GIB:.1f} GiB leaves"
            f" {available / GIB:.1f} of the {reading.available / GIB:.1f} GiB that are available;"
            f" {needs}: raise {LIMIT}"
        )
    else:
        msg = (
            f"{available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available; {needs}: end"
            " other programs that use memory (free -h, ps aux --sort=-rss)"
        )
    raise MemoryShortError(f"{msg}, or set your own share in SPARKFORGE_GPU_MEMORY_UTILIZATION")


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


def options(
    plan: MemoryPlan | None, caller: Sequence[str], share: str, machines: int
) -> tuple[list[str], str]:
    """Return the options for vLLM's share of memory: the user's share, else a computed one.

    Args:
        plan: None: vLLM's own share.
        caller: the user's options; one that sets the share is left alone.
        share: the user's own share, or "".
        machines: that the weights are split over.

    Returns:
        Options, and a description of the computation; "" where nothing was computed.

    Raises:
        MemoryShortError: the model does not fit.
    """
    if share:
        return [SHARE, share], ""
    if plan is None or any(arguments.has(caller, option) for option in (SHARE, *_OTHER_SHARES)):
        return [], ""
    reading, cuda_total = read(), devices.unified_bytes()
    computed = f"{utilisation(plan.split(machines), reading, cuda_total):.2f}"
    return [SHARE, computed], f"{described(reading, cuda_total)}: {SHARE} {computed}"
