"""JSON from a server: every wrong shape is a DocumentError."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

Kind = TypeVar("Kind")


class DocumentError(ValueError):
    """A value is missing or has another type; the message names the place."""


@dataclass(frozen=True)
class Document:
    """A JSON value."""

    what: str
    """Its origin, for errors."""
    value: Any

    def get(self, kind: type[Kind], *path: str | int) -> Kind:
        """Return the value at a path of keys and indices.

        Raises:
            DocumentError: there is none, or it has another type. True is not an integer.
        """
        place = f"{'.'.join(str(key) for key in path)} of {self.what}" if path else self.what
        found = self.value
        for key in path:
            try:
                found = found[key]
            except (LookupError, TypeError):
                raise DocumentError(f"{place} is missing") from None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise DocumentError(f"{place} is {repr(found)[:100]}, not a {kind.__name__}")
        return found
