"""Values from outside, that is from pins, patches, wheels and other programs."""

from __future__ import annotations

import base64
import csv
import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_MOST_OF_A_PART = 255  # bytes; Linux's NAME_MAX
_MOST = 1024  # bytes; leaves room for the folder in front of it below PATH_MAX
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
    """Return the reason why a path is not a plain relative one, as the end of a sentence, or None.

    The file need not exist.
    """
    parts = path.split("/")
    lengths = [len(part.encode(errors="surrogatepass")) for part in parts]
    if not printable(path) or "\\" in path:
        return "contains a backslash or a control character"
    if path.startswith("/") or ".." in parts:
        return "points outside its folder"
    if "" in parts or "." in parts:
        return "has an empty part or a dot part"
    if max(lengths) > _MOST_OF_A_PART or sum(lengths) + len(parts) > _MOST:
        return "is too long for a file system"
    return None


def record_rows(record: bytes) -> dict[str, str]:
    """Return the paths in a RECORD with their sha256 in hex, or ""; ValueError or csv.Error."""
    rows = {}
    for path, stated, *_ in filter(None, csv.reader(record.decode().splitlines())):
        kind, _, value = stated.partition("=")
        rows[path] = base64.urlsafe_b64decode(f"{value}==").hex() if kind == "sha256" else ""
    return rows


def json_of(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is not JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # making one takes some milliseconds


def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def values(found: object) -> Any:
    """Return anything as JSON values; ValueError if a field has a value of another type."""
    return _adapter(type(found)).dump_python(found, mode="json", by_alias=True, warnings="error")


def as_json(value: object) -> dict[str, Any]:
    """Return a dataclass as JSON values; raises what ``values`` does."""
    return dict(values(value))


def load(kind: type[T], value: object, *, exact: bool = True) -> T | None:
    """Return JSON values as a dataclass; None: another version of it wrote them.

    ``exact`` refuses unknown fields, and missing ones that have a default.
    """
    try:
        result: T = _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValueError:
        return None
    # shows fields that pydantic ignores or fills in
    return result if not exact or as_json(result) == value else None
