"""JSON from a server or a file: every wrong shape is a DocumentError.

No other module of this package calls ``json.loads``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Kind = TypeVar("Kind")

_NAMES: Mapping[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "a string",
    int: "an integer",
    bool: "true or false",
}


_LARGEST = 64 << 20
"""Bytes of a file. The largest is the record of a warm-up, which names each compiled file."""
_DEEPEST = 64
"""Levels of a document. Deeper ones would end recursive code, such as repr."""


class DocumentError(ValueError):
    """The text is not JSON, or has another shape; the message names the place."""


@dataclass(frozen=True)
class Document:
    """A JSON value."""

    what: str
    """Its origin, for errors."""
    value: Any

    @classmethod
    def parse(cls, what: str, text: str | bytes) -> Document:
        """Read JSON; DocumentError if the text is not JSON, or nested too deeply."""
        try:
            found = json.loads(text)
        except RecursionError:
            raise DocumentError(f"{what} is nested too deeply") from None
        except ValueError as error:
            raise DocumentError(f"{what} is not JSON: {str(error)[:100]}") from None
        level = [found]
        for _ in range(_DEEPEST):
            level = [child for value in level for child in _children(value)]
        if level:
            raise DocumentError(f"{what} is nested too deeply")
        return cls(what, found)

    @classmethod
    def load(cls, path: Path) -> Document:
        """Read JSON from a file.

        Raises:
            OSError: the file cannot be read.
            DocumentError: it is not JSON, or too large.
        """
        with path.open("rb") as opened:
            text = opened.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise DocumentError(f"{path} has more than {_LARGEST >> 20} MiB")
        return cls.parse(str(path), text)

    def get(self, kind: type[Kind], *path: str | int) -> Kind:
        """Return the value at a path of keys and indices.

        Raises:
            DocumentError: there is none, or it has another type. True is not an integer.
        """
        found = self.value
        for key in path:
            try:
                found = found[key]
            except (LookupError, TypeError):
                raise DocumentError(f"{self._place(path)} is missing") from None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise DocumentError(f"{self._place(path)} is {repr(found)[:100]}, not {_NAMES[kind]}")
        return found

    def find(self, kind: type[Kind], name: str) -> Kind | None:
        """Return the value of a key; None where it is missing or null.

        Raises:
            DocumentError: this is not a mapping, or the value has another type.
        """
        return None if self.get(dict).get(name) is None else self.get(kind, name)

    def check_keys(self, known: Iterable[str]) -> None:
        """Check that this is a mapping with known keys only.

        Raises:
            DocumentError: it is not, or has another key.
        """
        if unknown := sorted(self.get(dict).keys() - set(known)):
            raise DocumentError(f"{self.what} has an unknown key: {unknown[0][:100]!r}")

    def _place(self, path: tuple[str | int, ...]) -> str:
        return f"{'.'.join(str(key) for key in path)} of {self.what}" if path else self.what


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
