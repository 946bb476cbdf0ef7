"""JSON from outside, a server's answer or a file: every wrong shape is one error.

Nothing else in this folder calls ``json.loads``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Kind = TypeVar("Kind")

_WORDS: Mapping[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    int: "a number",
    bool: "true or false",
}


_LARGEST = 64 << 20
"""Bytes of a file. The largest of ours, the record of a warm-up, names each compiled file once."""
_DEEPEST = 64
"""Levels that any of these documents may have: what is deeper ends recursive code, like repr."""


class DocumentError(ValueError):
    """It is no JSON, or of another shape; the message says where."""


@dataclass(frozen=True)
class Document:
    """A value that was read from JSON.

    Attributes:
        what: names its origin in errors.
        value: anything that JSON can hold.
    """

    what: str
    value: Any

    @classmethod
    def parse(cls, what: str, text: str | bytes) -> Document:
        """Read JSON.

        Raises:
            DocumentError: it is none, or nested too deeply.
        """
        try:
            found = json.loads(text)
        except RecursionError:
            raise DocumentError(f"{what} is nested too deeply") from None
        except ValueError as error:
            raise DocumentError(f"{what} is no JSON: {str(error)[:100]}") from None
        level = [found]
        for _ in range(_DEEPEST):
            level = [child for one in level for child in _children(one)]
        if level:
            raise DocumentError(f"{what} is nested too deeply")
        return cls(what, found)

    @classmethod
    def load(cls, path: Path) -> Document:
        """Read JSON from a file.

        Raises:
            OSError: it cannot be read.
            DocumentError: it holds none, or is too large for one.
        """
        with path.open("rb") as opened:
            text = opened.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise DocumentError(f"{path} has more than {_LARGEST >> 20} MiB")
        return cls.parse(str(path), text)

    def get(self, kind: type[Kind], *path: str | int) -> Kind:
        """Return the value at a path of keys and indices.

        Raises:
            DocumentError: there is none, or it is of another kind. True is no number.
        """
        found = self.value
        for key in path:
            try:
                found = found[key]
            except (LookupError, TypeError):
                raise DocumentError(f"{self._place(path)} is missing") from None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            msg = f"{self._place(path)} is {repr(found)[:100]}, not {_WORDS[kind]}"
            raise DocumentError(msg)
        return found

    def _place(self, path: tuple[str | int, ...]) -> str:
        return f"{'.'.join(str(key) for key in path)} of {self.what}" if path else self.what


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
