"""Command lines of ``vllm serve``, and their options as vLLM's parser reads them."""

from __future__ import annotations

from collections.abc import Sequence


def has(arguments: Sequence[str], option: str) -> bool:
    """Return whether an option is there, as ``--a-b VALUE``, ``--a-b=VALUE`` or with ``_``."""
    names = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    return option in (name.replace("_", "-") for name in names)


def value(arguments: Sequence[str], option: str) -> str | None:
    """Return the value that vLLM uses for an option: the last one, in either notation."""
    result = None
    for index, word in enumerate(arguments):
        name, equals, text = word.partition("=")
        if word.startswith("--") and name.replace("_", "-") == option:
            following = arguments[index + 1] if index + 1 < len(arguments) else None
            result = text if equals else following
    return result


def positive(arguments: Sequence[str], option: str, default: int) -> int:
    """Return an option's value as a number above zero, or the default."""
    text = value(arguments, option) or ""
    return int(text) if text.isdecimal() and int(text) > 0 else default
