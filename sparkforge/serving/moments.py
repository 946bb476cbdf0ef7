"""One line of memory at each stage of a start: for the log, and for whoever reads it later.

On a machine of unified memory, model, page cache, kernels and programs share the same bytes. Which
of them holds how much changes from stage to stage, and cannot be learnt afterwards.
"""

from __future__ import annotations

from pathlib import Path

PREFIX = "memory at "
_GIB = 1 << 30
_FIELDS = {"MemTotal": "total", "MemAvailable": "available", "MemFree": "free",
           "Cached": "cached", "Dirty": "dirty", "Shmem": "shared"}  # fmt: skip


def line(moment: str, root: Path = Path("/")) -> str:
    """Return the memory of machine and container in GiB; never raises: a log line ends no start.

    Args:
        moment: a stage, e.g. ``first token``.
        root: holds ``proc`` and ``sys``.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
        kib = {name: int(rest.split()[0]) for name, rest in _rows(text) if rest.split()}
    except (OSError, ValueError) as error:
        return f"{PREFIX}{moment}: cannot be read: {error}"
    parts = [
        f"{name} {kib[field] / (1 << 20):.2f}" for field, name in _FIELDS.items() if field in kib
    ]
    if "SwapTotal" in kib and "SwapFree" in kib:
        parts.append(f"swapped {(kib['SwapTotal'] - kib['SwapFree']) / (1 << 20):.2f}")
    group = root / "sys/fs/cgroup"
    for name, word in (("current", "container"), ("peak", "container's peak"), ("max", "limit")):
        value = _bytes(group / f"memory.{name}")
        if value is not None:
            parts.append(f"{word} {value / _GIB:.2f}")
    return f"{PREFIX}{moment}, GiB: {', '.join(parts)}"


def _rows(text: str) -> list[tuple[str, str]]:
    return [(name, rest) for name, _, rest in (row.partition(":") for row in text.splitlines())]


def _bytes(file: Path) -> int | None:
    """Return a control group's figure; None where there is none ("max" is no figure)."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
