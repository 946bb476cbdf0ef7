"""Values from outside, that is from pins, patches, wheels and other programs."""

from __future__ import annotations

import base64
import csv
import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# control characters of terminals and of writing direction
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
T = TypeVar("T")


def printable(text: str) -> bool:
    """Return whether a text is one line without control characters."""
    return _UNPRINTABLE.search(text) is None


def escaped(text: str, keep: str = "") -> str:
    """Return a text with its control characters, but those to keep, as in Python's ``repr``."""
    return _UNPRINTABLE.sub(lambda one: one[0] if one[0] in keep else repr(one[0])[1:-1], text)


def path_problem(path: str) -> str | None:
    """Return why a path is not a plain relative one, as the end of a sentence, or None."""
    parts = path.split("/")
    lengths = [len(part.encode(errors="surrogatepass")) for part in parts]
    if not printable(path) or "\\" in path:
        return "contains a backslash or a control character"
    if path.startswith("/") or ".." in parts:
        return "points outside its folder"
    if "" in parts or "." in parts:
        return "has an empty part or a dot part"
    # Linux's NAME_MAX; and room for the folder in front of it below PATH_MAX, in bytes
    if max(lengths) > 255 or sum(lengths) + len(parts) > 1024:
        return "is too long for a file system"
    return None


def record_rows(record: bytes) -> dict[str, str]:
    """Return the paths in a RECORD with their sha256 in hex, or ""; ValueError or csv.Error."""
    rows = {}
    for path, stated, *_ in filter(None, csv.reader(record.decode().splitlines())):
        kind, _, value = stated.partition("=")
        rows[path] = base64.urlsafe_b64decode(f"{value}==").hex() if kind == "sha256" else ""
    return rows


@cache  # making one takes some milliseconds
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def as_json(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON values; ValueError if a field has a value of another type."""
    kind: Any = type(value)  # mypy takes no type for hashable
    how = _adapter(kind).dump_python
    return dict(how(value, mode="json", by_alias=True, warnings="error"))


def load(kind: type[T], value: object, *, exact: bool = True) -> T | None:
    """Return JSON values as a dataclass; None: another version of it wrote them.

    ``exact`` refuses unknown fields, and missing ones that have a default.
    """
    try:
        hashable: Any = kind
        result: T = _adapter(hashable).validate_json(json.dumps(value), strict=True)
    except ValueError:
        return None
    # shows fields that pydantic ignores or fills in
    return result if not exact or as_json(result) == value else None
