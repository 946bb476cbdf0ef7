"""A finished result in the store, and the seal of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core.hashing import key_of


@dataclass(frozen=True)
class Artefact:
    """A finished result in the store.

    Attributes:
        stage: which stage made it.
        key: sha256 of ``inputs`` in canonical JSON.
        inputs: everything that went in, by name.
        outputs: what the stage wants to tell later stages and the receipt.
        path: its folder.
        seconds: how long making it took.
    """

    stage: str
    key: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    path: Path
    seconds: float


def seal(meta: Mapping[str, Any]) -> str:
    """Return the sha256 of an artefact's record, by which a damaged one is known."""
    return key_of({name: value for name, value in meta.items() if name != "seal"})
