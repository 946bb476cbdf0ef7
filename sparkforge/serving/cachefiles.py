"""The files in a folder of compiled kernels: their paths, sizes and kernels' names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sparkforge.serving import durable
from sparkforge.serving.document import Document, DocumentError

LIST = "files.json"

# Not written by a compiler: locks, logs, lists, and indexes. (vLLM's CPU build adds an entry of
# aotautograd at its second start, with every kernel in the cache.)
_BESIDE = re.compile(
    r"(^|/)(locks|modelinfos|aotautograd|startup_plan|tmp[^/]*|\.nfs[^/]*|warm-up-[^/]*)(/|$)"
    r"|^/(files|preflight)\.json$|\.(lock|log|tmp|pid)$|/\.ninja_(log|deps)$"
)
_FUSED = re.compile(rb"\b(triton_(?:poi|red|per|tem|mm)_\w+|cpp_fused\w*)")
_SEARCHED = 1 << 18  # bytes of a generated file


def compiled(top: Path) -> Iterator[str]:
    """Yield the paths of a folder's compiled files, without locks and logs."""
    for folder, _, names in os.walk(top):
        for name in names:
            path = f"{folder}/{name}"
            if not _BESIDE.search(path[len(str(top)) :]):
                yield path


def sizes(paths: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files in bytes, without those that are gone by now."""
    found = {}
    for path in paths:
        try:
            found[path] = os.lstat(path).st_size
        except FileNotFoundError:
            continue
    return found


def listed(folder: Path) -> dict[str, int]:
    """Return the sizes that ``enlist`` has stored, by relative path; {} if that is damaged."""
    try:
        found = Document.load(folder / LIST)
        return {name: found.get(int, name) for name in found.get(dict)}
    except (OSError, DocumentError):
        return {}


def enlist(folder: Path, found: Mapping[str, int]) -> None:
    """Store the sizes of files that are on the disk; OSError if the list cannot be written."""
    durable.replace(folder / LIST, json.dumps(found, indent=1) + "\n")


def kernels(paths: Iterable[str]) -> list[str]:
    """Return the names of the kernels that some files of a cache belong to, sorted."""
    found = {_kernel(Path(path)) for path in paths}
    return sorted(name for name in found if name) or sorted({Path(path).name for path in paths})


def _kernel(path: Path) -> str:
    """Return the name of a file's kernel; "" where another file of the kernel gives it."""
    parts = path.parts
    if "cached_ops" in parts and (at := parts.index("cached_ops") + 1) < len(parts):
        return f"FlashInfer {parts[at]}"
    if path.suffix in (".cubin", ".ptx", ".ttir", ".ttgir", ".llir", ".json"):
        name = path.name.removeprefix("__grp__").partition(".")[0]
        return f"Triton {name}" if "triton" in parts else ""
    if path.suffix in (".py", ".cpp"):
        try:
            with path.open("rb") as opened:
                names = sorted(set(_FUSED.findall(opened.read(_SEARCHED))))
        except OSError:  # compiled, and moved on since
            names = []
        return f"torch.compile {', '.join(name.decode() for name in names[:3])}" if names else ""
    return ""
