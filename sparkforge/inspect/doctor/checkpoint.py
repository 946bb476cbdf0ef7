"""A model's files on the disk: read here, checked in ``storage``.

The first bytes of a safetensors file give its length, so a truncated shard is found without reading
the weights: 8 bytes (little endian) give the length of a JSON header, whose largest
``data_offsets`` is the length of the rest.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkforge.core import plain
from sparkforge.serving import pagecache

_HEADER_LIMIT = 100 << 20  # the format's own


def folder_of(hub: Path, repository: str) -> Path:
    """Return the folder that a hub cache keeps a model in."""
    return hub / f"models--{repository.replace('/', '--')}"


def read(hub: Path, repository: str, revision: str) -> dict[str, Any]:
    """Read the files of a model's revision in a hub cache.

    Returns:
        ``hub``, ``snapshot`` (path or None), ``revisions`` (in the cache), ``incomplete`` (partly
        downloaded files), and the result of ``read_folder``.

    Raises:
        OSError: a folder cannot be read.
    """
    folder = folder_of(hub, repository)
    snapshots = folder / "snapshots"
    there = sorted(one.name for one in snapshots.iterdir()) if snapshots.is_dir() else []
    snapshot = pagecache.snapshot(hub, repository, revision)
    return {
        "hub": str(hub),
        "snapshot": str(snapshot) if snapshot else None,
        "revisions": there,
        "incomplete": sorted(one.name for one in (folder / "blobs").glob("*.incomplete")),
        **(read_folder(snapshot) if snapshot else {}),
    }


def read_folder(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's folder.

    Returns:
        ``config`` (whether config.json exists), ``named`` (shards in the index; without an index:
        existing safetensors), ``index_problem`` (or ""),
        ``shards``: by name, {size, expected} in bytes, or {problem}.
    """
    index = folder / "model.safetensors.index.json"
    named, problem = [], ""
    if index.exists():
        try:
            named = sorted(
                set(plain.json_of(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, LookupError, AttributeError, TypeError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
    else:
        named = [file.name for file in pagecache.weight_files(folder)]
    # a name in a file from outside must stay in the folder
    strange = [name for name in named if not re.fullmatch(r"[\w.-]+\.safetensors", str(name))]
    if strange:
        named, problem = [], f"it names {strange[0]!r}, which is no shard"
    return {
        "folder": str(folder),
        "config": (folder / "config.json").is_file(),
        "named": named,
        "index_problem": problem,
        "shards": {name: _shard(folder / name) for name in named},
        "incomplete_here": sorted(one.name for one in folder.glob("*.incomplete")),
    }


def _shard(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= _HEADER_LIMIT or length > size:
                return {"size": size, "problem": "no safetensors header"}
            header = plain.json_of(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        return {"size": size, "expected": 8 + length + max(ends, default=0)}
    except FileNotFoundError:
        return {"problem": "missing"}
    except OSError as error:
        return {"problem": str(error.strerror)}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {"problem": "no safetensors header"}
