"""Options of ``vllm serve``: as vLLM's parser reads them, and those of our plugin.

Users write ``--mxfp4-layers``, ``--decode-kernels`` and ``--moe-backend bf16_dequant``. vLLM knows
none of them: its plugin vllm_sparkforge does, and reads them in ``--additional-config``. They are
translated last, when vLLM is started, so all that is shown or compared has the user's words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sparkforge.serving.errors import SettingError

CONFIG = "--additional-config"
"""A JSON object for all of vLLM's plugins."""
KEY = "sparkforge"
"""Of our plugin's options in it."""
_KEYS = {"--mxfp4-layers": "mxfp4_layers", "--decode-kernels": "decode_kernels"}
"""Keys of our plugin, by options that vLLM does not have."""
_MOE, _EXPERTS = "--moe-backend", "bf16_dequant"
"""An option of vLLM, and our plugin's value of it."""


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


def for_plugin(options: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve``, with those of our plugin where it reads them.

    Of two values of an option the last one counts, as in vLLM. The rest of a given
    ``--additional-config`` is kept. Without an option of ours it is left for vLLM to judge.

    Raises:
        SettingError: an option of ours has no value, or ``--additional-config`` is no JSON object.
    """
    kept: list[str] = []
    last: dict[str, list[str]] = {}  # the words of the options that may be ours
    words = list(options)
    while words:
        word = words.pop(0)
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith(f"{CONFIG}."):  # vLLM makes one object of all of these
            raise SettingError(f"{word.partition('=')[0]} is not possible here", f"use {CONFIG}")
        if option not in (*_KEYS, _MOE, CONFIG):
            kept.append(word)
        elif "=" not in word and words and not words[0].startswith("-"):
            last[option] = [word, words.pop(0)]
        else:
            last[option] = [word]
    found: dict[str, Any] = {}
    for option, key in _KEYS.items():
        if option in last:
            found[key] = value(last.pop(option), option)
            if not found[key]:
                raise SettingError(f"{option} has no value", f"write {option} VALUE")
    # vLLM's parser reads the names of backends so
    if (value(last.get(_MOE, ()), _MOE) or "").lower().replace("-", "_") == _EXPERTS:
        del last[_MOE]
        found["experts"] = _EXPERTS
    if found:
        merged = _object(value(last.pop(CONFIG, ()), CONFIG) or "{}")
        merged[KEY] = {**merged.get(KEY, {}), **found}
        config = json.dumps(merged, sort_keys=True, separators=(",", ":"))
        last[CONFIG] = [f"{CONFIG}={config}"]
    return [*kept, *(word for pair in last.values() for word in pair)]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get(KEY, {}), dict):
        # without the value, which may be a secret
        raise SettingError(f"the value of {CONFIG} is no JSON object", f"write {CONFIG} '{{...}}'")
    return found
