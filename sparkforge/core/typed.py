"""Dataclasses as JSON values and back."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)  # some milliseconds
    return _ADAPTERS[kind]


def as_json(value: object) -> dict[str, Any]:
    """Return a dataclass as JSON values; ValueError if a field has a value of another type."""
    adapter = _adapter(type(value))
    result: dict[str, Any] = adapter.dump_python(
        value, mode="json", by_alias=True, warnings="error"
    )
    return result


def load(kind: type[T], value: object) -> T | None:
    """Return JSON values as a dataclass.

    Returns:
        None where a field is missing, unknown, or of another type: another version wrote it.
    """
    try:
        result = _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValueError:
        return None
    # fields that pydantic ignores or fills in make a difference here
    return result if as_json(result) == value else None
