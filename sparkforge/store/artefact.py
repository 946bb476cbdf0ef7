"""A finished result in the store, and the seal of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkforge.core import typed
from sparkforge.core.hashing import key_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Artefact(Generic[T_co]):
    """A finished result in the store."""

    stage: str
    key: str
    """sha256 of ``inputs`` in canonical JSON."""
    inputs: Mapping[str, Any]
    """All inputs, by name."""
    result: T_co
    """For later stages and the receipt."""
    path: Path
    seconds: float
    """Time that it took."""


@dataclass(frozen=True)
class _Record:
    """An artefact as ``artefact.json`` has it."""

    stage: str
    key: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    seconds: float
    seal: str


def record(stage: str, inputs: Mapping[str, Any], result: object, seconds: float) -> dict[str, Any]:
    """Return the record of an artefact as JSON values."""
    values = {
        "stage": stage,
        "key": key_of(inputs),
        "inputs": inputs,
        "outputs": typed.as_json(result),
        "seconds": round(seconds, 3),
    }
    return {**values, "seal": seal(values)}


def load(kind: type[T], values: Mapping[str, Any] | None, path: Path) -> Artefact[T] | None:
    """Return the artefact of a record.

    Returns:
        None where the record is damaged, or its result is not of that type: then another version of
        sparkforge made it.
    """
    found = typed.load(_Record, values)
    if found is None or found.seal != seal(values or {}):
        return None
    result = typed.load(kind, found.outputs)
    if result is None:
        return None
    return Artefact(found.stage, found.key, found.inputs, result, path, found.seconds)


def seal(values: Mapping[str, Any]) -> str:
    """Return the sha256 of an artefact's record, which reveals damage."""
    return key_of({name: value for name, value in values.items() if name != "seal"})
