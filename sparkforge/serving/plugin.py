"""Our own options of ``vllm serve``, in the words of vLLM's parser.

Users write ``--mxfp4-layers``, ``--decode-kernels`` and ``--moe-backend bf16_dequant``. vLLM knows
none of them: its plugin vllm_sparkforge does, and reads them in ``--additional-config``. They are
translated last, when vLLM is started, so all that is shown, recorded or compared has the user's
words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkforge.serving.errors import SettingError

CONFIG = "--additional-config"
"""A JSON object for all of vLLM's plugins."""
KEY = "sparkforge"
"""Of our plugin's options in it."""
_KEYS: Mapping[str, str] = {
    "--mxfp4-layers": "mxfp4_layers",
    "--decode-kernels": "decode_kernels",
}
"""Keys of our plugin, by options that vLLM does not have."""
_MOE, _EXPERTS = "--moe-backend", "bf16_dequant"
"""An option of vLLM, and our plugin's value of it."""
_HINT = f'give an object, as in {CONFIG} \'{{"name": {{"key": 1}}}}\''


@dataclass(frozen=True)
class _Part:
    """One word of a command, or two: an option of this module, and its value."""

    words: Sequence[str]
    option: str = ""
    """The option of this module, with dashes; "" for other words."""
    value: str | None = None
    """None: it has none."""

    @property
    def expands(self) -> bool:
        """Whether it has the experts expanded to BF16."""
        # vLLM's parser reads the names of backends so
        said = (self.value or "").lower().replace("-", "_")
        return self.option == _MOE and said == _EXPERTS


def for_plugin(options: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve``, with those of our plugin where it reads them.

    Of two values of an option the last one counts, as in vLLM. What a given ``--additional-config``
    says beside them is kept, but not that of a file for ``--config``, which vLLM reads. Without an
    option of ours it is left as it is, for vLLM to judge.

    Raises:
        SettingError: an option of ours has no value, or they cannot be added to the given
            ``--additional-config``.
    """
    parts = list(_parts(options))
    last = {part.option: part for part in parts if part.option}
    found = {key: last[option].value for option, key in _KEYS.items() if option in last}
    for option, key in _KEYS.items():
        if found.get(key, "") is None:
            raise SettingError(f"{option} has no value", f"write {option} VALUE, or leave it out")
    expands = _MOE in last and last[_MOE].expands
    if expands:
        found["experts"] = _EXPERTS
    # an earlier value of ours, too: vLLM refuses each one that it does not know
    kept = [
        part
        for part in parts
        if part.option not in _KEYS and not (part.option == _MOE and (expands or part.expands))
    ]
    if not found:
        return _words(kept)
    if any(_is_dotted(word) for word in _words(kept)):
        # vLLM makes one object of all options with a dot, in place of any other
        return [*_words(kept), f"{CONFIG}.{KEY}={_json(found)}"]
    given = _object(_loaded(last[CONFIG].value)) if CONFIG in last else {}
    merged = {**given, KEY: {**_object(given.get(KEY, {}), f" of {KEY}"), **found}}
    others = [part for part in kept if part.option != CONFIG]
    return [*_words(others), f"{CONFIG}={_json(merged)}"]


def _loaded(text: str | None) -> Any:
    """Return the value of a JSON text; None for what is no JSON."""
    try:
        return json.loads(text or "")
    except ValueError:
        return None


def _object(value: Any, what: str = "") -> dict[str, Any]:
    """Return a JSON object; the error does not repeat another value, which may be a secret."""
    if not isinstance(value, dict):
        raise SettingError(f"the value{what} in {CONFIG} is no JSON object", _HINT)
    return value


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _words(parts: Sequence[_Part]) -> list[str]:
    return [word for part in parts for word in part.words]


def _is_dotted(word: str) -> bool:
    """Return whether a word sets one key of the configuration: ``--additional-config.KEY``."""
    name, dot, _ = word.partition("=")[0].partition(".")
    return bool(dot) and name.replace("_", "-") == CONFIG


def _parts(options: Sequence[str]) -> Iterator[_Part]:
    words = list(options)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        option = name.replace("_", "-")
        if not word.startswith("--") or option not in (*_KEYS, _MOE, CONFIG):
            yield _Part((word,))
        elif equals:
            yield _Part((word,), option, text)
        elif words and not words[0].startswith("-"):
            value = words.pop(0)
            yield _Part((word, value), option, value)
        else:
            yield _Part((word,), option)
