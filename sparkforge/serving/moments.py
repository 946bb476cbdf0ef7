"""A log line about memory at each stage of a start.

With unified memory, model, page cache, kernels and programs share the same bytes. Their parts
change from stage to stage, and cannot be measured afterwards.
"""

from __future__ import annotations

from pathlib import Path

from sparkforge.serving import memory

PREFIX = "memory at "
_FIELDS = {
    "MemTotal": "total",
    "MemAvailable": "available",
    "MemFree": "free",
    "Cached": "cached",
    "Dirty": "dirty",
    "Shmem": "shared",
}
_GROUP = {"current": "container", "peak": "container's peak", "max": "limit"}


def line(moment: str, root: Path = Path("/")) -> str:
    """Return the memory of machine and container in GiB; an error is part of the line.

    Args:
        moment: a stage, e.g. ``first token``.
        root: holds ``proc`` and ``sys``.
    """
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace")
        have, group = memory.meminfo(text), memory.group(root)
    except (OSError, ValueError) as error:
        return f"{PREFIX}{moment}: cannot be read: {error}"
    found = {word: have[name] for name, word in _FIELDS.items() if name in have}
    if "SwapTotal" in have and "SwapFree" in have:
        found["swapped"] = have["SwapTotal"] - have["SwapFree"]
    found |= {word: group[name] for name, word in _GROUP.items() if name in group}
    parts = [f"{word} {size / memory.GIB:.2f}" for word, size in found.items()]
    return f"{PREFIX}{moment}, GiB: {', '.join(parts)}"
