"""Read and check single variables of the container's environment.

An invalid value is a StartError, which names the variable.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping

from sparkforge.serving.errors import StartError

Variables = Mapping[str, str]


def check_text(variables: Variables) -> None:
    """Check that our variables are UTF-8: vLLM would fail without naming the variable."""
    for name, value in variables.items():
        if name.startswith("SPARKFORGE_") and (
            "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
        ):
            raise StartError(f"{name} is not UTF-8 text")


def listen_port(variables: Variables) -> int:
    """Return the port in the container. The health check needs a fixed one, so 0 is refused."""
    text = variables.get("SPARKFORGE_LISTEN_PORT") or "8000"
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise StartError(f"SPARKFORGE_LISTEN_PORT is {text!r}: use 1 to 65535")
    return int(text)


def listen_host(variables: Variables) -> str:
    """Return the address in the container, or "" for all addresses."""
    host = variables.get("SPARKFORGE_LISTEN_HOST", "")
    if host not in ("", "127.0.0.1", "0.0.0.0"):
        name = "SPARKFORGE_LISTEN_HOST (SPARKFORGE_BIND of two machines' .env)"
        raise StartError(f"{name} is {host!r}: use 127.0.0.1 or 0.0.0.0")
    return host


def options(variables: Variables, name: str) -> list[str]:
    """Return the options in a variable, split as a shell splits them."""
    try:
        return shlex.split(variables.get(name, ""))
    except ValueError as error:  # without the text, which may hold a secret
        raise StartError(f"{name} is not valid shell syntax: {error}; correct its quotes") from None


def choice(variables: Variables, name: str, default: str, allowed: tuple[str, ...]) -> str:
    """Return the value of a variable with a few allowed values.

    Args:
        default: the profile's, where it has one.
    """
    value = variables.get(name) or default
    if value not in allowed:
        where = name if variables.get(name) else f"the profile's value for {name}"
        raise StartError(f"{where} is {value!r}: use {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value


def number(variables: Variables, name: str, default: float) -> float:
    """Return the value of a variable with a number, zero or more."""
    text = variables.get(name) or str(default)
    value = _float(text)
    if not 0 <= value < math.inf:
        raise StartError(f"{name} is {text!r}: use a number")
    return value


def memory_share(variables: Variables) -> str:
    """Return the user's own share of memory, or ""."""
    name = "SPARKFORGE_GPU_MEMORY_UTILIZATION"
    text = variables.get(name, "")
    if text and not 0 < _float(text) <= 1:
        raise StartError(f"{name} is {text!r}: use a number above 0, and 1 at most")
    return text


def layers(variables: Variables) -> str:
    """Return ``SPARKFORGE_MXFP4_LAYERS``, or "". vLLM checks the names."""
    name = "SPARKFORGE_MXFP4_LAYERS"
    text = variables.get(name, "")
    if text and not re.fullmatch(r"[a-z_]+(=\w+)?( *, *[a-z_]+(=\w+)?)*", text):
        raise StartError(f"{name} is {text!r}: use a list like qkv,o,lm_head=mxfp8")
    return text


def max_jobs(variables: Variables) -> int | None:
    """Return the user's own number of parallel compilers, or None.

    With 0 FlashInfer would start one for each CPU.
    """
    text = variables.get("MAX_JOBS", "")
    if text and (not re.fullmatch("[0-9]{1,4}", text) or not int(text)):
        raise StartError(f"MAX_JOBS is {text!r}: use a whole number, 1 or more")
    return int(text) if text else None


def marks(variables: Variables) -> tuple[float, float, float]:
    """Return the memory guard's marks, in GiB.

    The default is an estimate: no Spark has run out of memory under it. Compilers leave 4 GiB free,
    too (compilers.py).
    """
    name = "SPARKFORGE_MEMORY_MARKS"
    text = variables.get(name) or "6,4,2"
    values = [_float(part) for part in text.split(",")]
    if len(values) != 3 or not math.inf > values[0] > values[1] > values[2] > 0:
        raise StartError(f"{name} is {text!r}: use three falling numbers of GiB, like 6,4,2")
    return values[0], values[1], values[2]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
