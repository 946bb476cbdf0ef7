"""Text from outside: JSON, plain relative paths, and its display.

From pins, patches, wheels and other programs.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MOST_OF_A_PART = 255  # bytes; Linux's NAME_MAX
_MOST = 1024  # bytes; leaves room for the folder in front of it below PATH_MAX
# control characters of terminals and of writing direction
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> bool:
    """Return whether a text is one line without control characters."""
    return _UNPRINTABLE.search(text) is None


def escaped(text: str, keep: str = "") -> str:
    """Return a text with each control character written out, as in Python's ``repr``.

    Args:
        keep: those that stay as they are.
    """

    def written(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else repr(match[0])[1:-1]

    return _UNPRINTABLE.sub(written, text)


def json_of(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is not JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def path_problem(path: str) -> str | None:
    """Return the reason why a path is not a plain relative one, as the end of a sentence, or None.

    Plain: parts joined by one slash each, none of them empty, ``.`` or ``..``, no backslash,
    nothing unprintable, and short enough for a file system. The file need not exist.
    """
    parts = path.split("/")
    lengths = [len(part.encode(errors="surrogatepass")) for part in parts]
    if not path:
        return "is empty"
    if not printable(path):
        return "contains a control character"
    if "\\" in path:
        return "contains a backslash"
    if path.startswith("/"):
        return "is an absolute path"
    if ".." in parts:
        return "points outside its folder"
    if "" in parts or "." in parts:
        return "has an empty part or a dot part"
    if max(lengths) > _MOST_OF_A_PART or sum(lengths) + len(parts) > _MOST:
        return "is too long for a file system"
    return None
