"""A model's files on disk: read here, checked in ``storage``.

The first bytes of a safetensors file give its length, so a truncated shard is found without reading
the weights: 8 bytes (little endian) give the length of a JSON header, whose largest
``data_offsets`` is the length of the rest.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge.core import plain
from sparkforge.serving import pagecache

_HEADER_LIMIT = 100 << 20  # the format's own


@dataclass(frozen=True)
class Shard:
    """A safetensors file; sizes in bytes, None: not known."""

    size: int | None = None
    expected: int | None = None
    """By its header."""
    problem: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files."""

    hub: str = ""
    """The hub cache; "": a folder of the user's own."""
    revisions: tuple[str, ...] = ()
    """In the cache."""
    incomplete: tuple[str, ...] = ()
    """Partly downloaded files of the cache."""
    folder: str = ""
    """"": the cache does not have the revision."""
    config: bool = False
    """Whether config.json exists."""
    index_problem: str = ""
    incomplete_here: tuple[str, ...] = ()
    """As ``incomplete``, of the folder."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Of the index; without one, the safetensors files that exist."""


def folder_of(hub: Path, repository: str) -> Path:
    """Return a model's folder in a hub cache."""
    return hub / f"models--{repository.replace('/', '--')}"


def read(hub: Path, repository: str, revision: str) -> Checkpoint:
    """Read the files of a model's revision in a hub cache; OSError if a folder is unreadable."""
    folder = folder_of(hub, repository)
    snapshots = folder / "snapshots"
    there = sorted(snapshot.name for snapshot in snapshots.iterdir()) if snapshots.is_dir() else []
    snapshot = pagecache.snapshot(hub, repository, revision)
    return replace(
        read_folder(snapshot) if snapshot else Checkpoint(),
        hub=str(hub),
        revisions=tuple(there),
        incomplete=_incomplete(folder / "blobs"),
    )


def read_folder(folder: Path) -> Checkpoint:
    """Read a checkpoint's folder."""
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
    # a name from outside must stay in the folder
    strange = [name for name in named if not re.fullmatch(r"[\w.-]+\.safetensors", str(name))]
    if strange:
        named, problem = [], f"it names {strange[0]!r}, which is no shard"
    return Checkpoint(
        folder=str(folder),
        config=(folder / "config.json").is_file(),
        index_problem=problem,
        incomplete_here=_incomplete(folder),
        shards={name: _shard(folder / name) for name in named},
    )


def _incomplete(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.glob("*.incomplete")))


def _shard(path: Path) -> Shard:
    size = None
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= _HEADER_LIMIT or length > size:
                raise ValueError
            header = plain.json_of(file.read(length))
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
        return Shard(size, 8 + length + max(ends, default=0))
    except FileNotFoundError:
        return Shard(problem="missing")
    except OSError as error:
        return Shard(problem=str(error.strerror))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Shard(size, problem="no safetensors header")
