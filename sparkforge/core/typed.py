"""Dataclasses as JSON values and back."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return pydantic's adapter of a type, made once."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)  # some milliseconds
    return _ADAPTERS[kind]


def as_json(value: object) -> dict[str, Any]:
    """Return a dataclass as JSON values; ValueError if a field has a value of another type."""
    result: dict[str, Any] = adapter(type(value)).dump_python(
        value, mode="json", by_alias=True, warnings="error"
    )
    return result


def load(kind: type[T], value: object, *, exact: bool = True) -> T | None:
    """Return JSON values as a dataclass.

    Args:
        exact: refuse unknown fields, and missing ones that have a default.

    Returns:
        None where a field is missing, unknown, or of another type: another version wrote it.
    """
    try:
        result = adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValueError:
        return None
    # shows fields that pydantic ignores or fills in
    return result if not exact or as_json(result) == value else None
