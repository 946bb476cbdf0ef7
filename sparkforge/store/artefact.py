"""A finished result in the store, and the seal of its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkforge.core import plain
from sparkforge.core.disk import key_of

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


def record(stage: str, inputs: Mapping[str, Any], result: object, seconds: float) -> dict[str, Any]:
    """Return the record of an artefact as JSON values."""
    values = {
        "stage": stage,
        "key": key_of(inputs),
        "inputs": inputs,
        "outputs": plain.as_json(result),
        "seconds": round(seconds, 3),
    }
    return {**values, "seal": seal(values)}


def load(kind: type[T], values: Mapping[str, Any] | None, path: Path) -> Artefact[T] | None:
    """Return the artefact of a record; None if it is damaged or has a result of another type."""
    if values is None or values.get("seal") != seal(values):
        return None
    match values:
        case {"stage": str(stage), "key": str(key), "inputs": dict(inputs), "outputs": outputs}:
            result = plain.load(kind, outputs)
            seconds = float(values.get("seconds", 0))
            return None if result is None else Artefact(stage, key, inputs, result, path, seconds)
    return None


def seal(values: Mapping[str, Any]) -> str:
    """Return the sha256 of an artefact's record, which reveals damage."""
    return key_of({name: value for name, value in values.items() if name != "seal"})
