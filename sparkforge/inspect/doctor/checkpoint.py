"""A model's files on disk: read here, checked in ``storage``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkforge.serving import checkpoint
from sparkforge.serving.checkpoint import Shard


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
    snapshot = checkpoint.snapshot(hub, repository, revision)
    return replace(
        read_folder(snapshot) if snapshot else Checkpoint(),
        hub=str(hub),
        revisions=tuple(there),
        incomplete=_incomplete(folder / "blobs"),
    )


def read_folder(folder: Path) -> Checkpoint:
    """Read a checkpoint's folder."""
    named, problem = [], ""
    try:
        named = checkpoint.named(folder)
    except (OSError, ValueError) as error:
        problem = str(error)
    return Checkpoint(
        folder=str(folder),
        config=(folder / "config.json").is_file(),
        index_problem=problem,
        incomplete_here=_incomplete(folder),
        shards={name: checkpoint.read(folder / name) for name in named},
    )


def _incomplete(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.glob("*.incomplete")))
