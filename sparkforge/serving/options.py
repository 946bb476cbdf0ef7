"""The entrypoint's errors and exit codes, and the options of ``vllm serve``, also our plugin's.

Users write ``--mxfp4-layers``, ``--decode-kernels``, ``--all-reduce`` and ``--moe-backend
bf16_dequant``, and our plugin reads them in ``--additional-config``. They are translated last: logs
have the user's words.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence

# sysexits.h. A restart may fix all but 65 and 78.
EX_DATAERR = 65  # the hub sends other bytes than it lists: each restart would download them again
EX_NOINPUT, EX_NOHOST, EX_UNAVAILABLE, EX_OSERR = 66, 68, 69, 71
EX_CANTCREAT, EX_TEMPFAIL, EX_PROTOCOL = 73, 75, 76
EX_CONFIG = 78  # a setting is wrong: no restart changes it


class StartError(Exception):
    """The server cannot be started. The message has a hint, ``code`` is the exit code."""

    def __init__(self, text: str, code: int = EX_CONFIG) -> None:
        super().__init__(text)
        self.code = code


class SettingError(StartError):
    """A setting cannot be used: ``what`` is wrong, and a ``hint`` what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}: {hint}")
        self.what, self.hint = what, hint


def say(text: str) -> None:
    """Print a line between the server's, in the container's log."""
    print(f"entrypoint: {text}", file=sys.stderr, flush=True)


CONFIG, KEY = "--additional-config", "sparkforge"  # a JSON object, and our plugin's key in it
_KEYS = {
    "--mxfp4-layers": "mxfp4_layers",
    "--decode-kernels": "decode_kernels",
    "--all-reduce": "all_reduce",
    "--failed-kernels": "failed",
}
_LAYER = re.compile(r"(qkv|o|lm_head)(=(mxfp[48]|int[68]|nvfp4|lossless))?|moe(=mxfp4)?")
_MOE, _EXPERTS = "--moe-backend", "bf16_dequant"  # an option of vLLM, and our plugin's value of it
SECRET_NAME = r"(?:api[-_]?key|token(?!iz|s)|secret|passw|credential|authorization)"
"""Pattern, in lower case, in the names of secrets; it does not match ``max_tokens``."""
IN_URL = re.compile(r"(?<=://)(?:[^/\s\"'<>]+|[^/@:\s\"'<>]+:(?!\d{1,5}/)[^\s\"'<>]*)@")
"""User name and password of an address. A password may have a slash, which also ends a port."""
_IN_JSON = re.compile(rf'(?is)("[^"]*{SECRET_NAME}[^"]*"\s*:\s*)"(?:[^"\\]|\\.)*"?')
_IN_DOTTED = re.compile(rf"(?i)--[^.]+\..*{SECRET_NAME}")
_REFUSED = (  # each would open another way in, or move the one that the front door uses
    *("--api-key", "--host", "--port", "--uds", "--grpc", "--config", "--root-path"),
    *("--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins"),
    *("--data-parallel-multi-port-external-lb", "--enable-ssl-refresh"),
)


def has(words: Sequence[str], option: str) -> bool:
    """Return whether an option is there, as ``--a-b VALUE``, ``--a-b=VALUE`` or with ``_``."""
    names = (word.partition("=")[0] for word in words if word.startswith("--"))
    return option in (name.replace("_", "-") for name in names)


def value(words: Sequence[str], option: str) -> str | None:
    """Return the value that vLLM uses for an option: the last one, in either notation."""
    result = None
    for word, following in zip(words, [*words[1:], None], strict=False):
        if has([word], option):
            result = word.partition("=")[2] if "=" in word else following
    return result


def positive(words: Sequence[str], option: str, default: int) -> int:
    """Return an option's value as a number above zero, or the default."""
    text = value(words, option) or ""
    return int(text) if text.isdecimal() and int(text) > 0 else default


def check(words: Sequence[str]) -> None:
    """Refuse options that would open the server another way than by the front door."""
    for name in (word.partition("=")[0] for word in words):
        if meant(name, _REFUSED) or name.startswith("--ssl"):
            msg = f"the option {name} is not possible here: the front door has key, address and"
            msg += " web pages (SPARKFORGE_API_KEY_FILE, _BIND, _PORT, _ORIGINS), a proxy has TLS"
            raise StartError(f"{msg}; write options as words, not into a --config")


def meant(word: str, options: Iterable[str]) -> str:
    """Return the option that vLLM's parser could take a word for, abbreviated or not, or ""."""
    plain = word.replace("_", "-")
    return next((one for one in options if len(plain) > 2 and one.startswith(plain)), "")


def layers(text: str) -> str:
    """Return a value of ``--mxfp4-layers``; ValueError where the plugin would refuse it."""
    items = [one.strip() for one in text.split(",")]
    if wrong := [one for one in items if not _LAYER.fullmatch(one)]:
        raise ValueError(f"there is no layer or format {wrong[0]!r}")
    if len({one.partition("=")[0] for one in items}) < len(items):
        raise ValueError("a layer occurs twice")
    return text


def for_plugin(words: Sequence[str]) -> list[str]:
    """Return options of ``vllm serve``, with those of our plugin where it reads them.

    Of two values of an option the last one counts, as in vLLM. The rest of a given
    ``--additional-config`` is kept. Without an option of ours it is left for vLLM to judge.
    """
    kept: list[str] = []
    ours: dict[str, str] = {}  # the last value of each option that may be ours
    rest = list(words)
    while rest:
        name, equals, text = (word := rest.pop(0)).partition("=")
        option = name.replace("_", "-")
        if option.startswith(f"{CONFIG}."):  # vLLM makes one object of all of these
            raise SettingError(f"{name} is not possible here", f"use {CONFIG}")
        if option in (*_KEYS, _MOE, CONFIG):
            alone = equals or not rest or rest[0].startswith("-")
            ours.pop(option, None)  # the order is that of the last ones
            ours[option] = text if alone else rest.pop(0)
        else:
            kept.append(word)
    before = [*ours, CONFIG].index(CONFIG)
    earlier = {_KEYS[option]: option for option in [*ours][:before] if option in _KEYS}
    found = {key: ours.pop(option) for option, key in _KEYS.items() if option in ours}
    if not all(found.values()):
        raise SettingError(f"one of {', '.join(_KEYS)} has no value", "write --OPTION VALUE")
    try:
        layers(found.get("mxfp4_layers", "moe"))
    except ValueError as error:  # the plugin would say so in a traceback, or after the download
        msg = f"--mxfp4-layers {found['mxfp4_layers']}: {error}"
        raise SettingError(msg, "write a list like qkv=int8,o=int8,lm_head=int6") from None
    if (given := found.get("decode_kernels", "auto")) not in ("auto", "on", "off"):
        raise SettingError(f"--decode-kernels {given}: no such value", "use auto, on or off")
    # vLLM's parser reads the names of backends so
    if ours.get(_MOE, "").lower().replace("-", "_") == _EXPERTS:
        found["experts"] = _EXPERTS
        del ours[_MOE]
    if found:
        try:
            merged = json.loads(ours.get(CONFIG) or "{}")
            if lost := earlier.keys() & merged.get(KEY, {}):  # of the profile's, or of the user's
                option = earlier[min(lost)]
                raise SettingError(f"{CONFIG} cannot replace {option}", f"write {option} again")
            merged[KEY] = {**merged.get(KEY, {}), **found}
        except (ValueError, TypeError, AttributeError):  # without the value: it may be a secret
            msg = f"the value of {CONFIG} is no JSON object"
            raise SettingError(msg, f"write {CONFIG} '{{...}}'") from None
        ours[CONFIG] = json.dumps(merged, sort_keys=True, separators=(",", ":"))
    return [*kept, *(f"{option}={text}" if text else option for option, text in ours.items())]


def shown(text: object) -> str:
    """Return another program's message in one line, without passwords of URLs and the token."""
    line = IN_URL.sub("***@", " ".join(str(text).split()))
    line = re.sub(r"(?<=port: ')[^']*", "***", line)  # httpx's, of a password with a slash
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if len(secret := os.environ.get(name, "").strip()) > 3:
            line = line.replace(secret, "***")
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


def redacted(words: Sequence[str]) -> list[str]:
    """Return a command for the log, without secrets: by names of options and keys, and in URLs."""
    found: list[str] = []
    secret = False
    for word in words:
        option, equals, _ = word.partition("=")
        if meant(option, ("--api-key", "--hf-token")) or _IN_DOTTED.match(option):
            secret = not equals
            found.append(f"{option}=***" if equals else option)
        elif secret and not word.startswith("--"):  # --api-key takes several values
            found.append("***")
        else:
            secret = False
            found.append(IN_URL.sub("***@", _IN_JSON.sub(r'\1"***"', word)))
    return found
