"""The entrypoint's variables, read once and checked before anything is started."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping

from sparkforge.serving.errors import StartError

Variables = Mapping[str, str]


def check_text(variables: Variables) -> None:
    """Refuse what is no UTF-8: vLLM would fail at it without the variable's name.

    Raises:
        StartError: the value of one of our variables is none.
    """
    for name, value in variables.items():
        if name.startswith("SPARKFORGE_") and (
            "\0" in value or any("\ud800" <= one <= "\udfff" for one in value)
        ):
            raise StartError(f"{name} is no text in UTF-8")


def listen_port(variables: Variables) -> int:
    """Return the port in the container; 0, any, is none that the health check could ask.

    Raises:
        StartError: it is none.
    """
    text = variables.get("SPARKFORGE_LISTEN_PORT") or "8000"
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise StartError(f"SPARKFORGE_LISTEN_PORT is {text!r}: use 1 to 65535")
    return int(text)


def words(variables: Variables, name: str) -> list[str]:
    """Return the options in a variable, split as a shell would.

    Raises:
        StartError: a shell would not read them.
    """
    try:
        return shlex.split(variables.get(name, ""))
    except ValueError as error:  # without the text: it may hold a secret
        msg = f"{name} is not what a shell would read: {error}; correct its quotes"
        raise StartError(msg) from None


def choice(variables: Variables, name: str, default: str, allowed: tuple[str, ...]) -> str:
    """Return the value of a variable that takes one of a few words.

    Args:
        default: of the profile.

    Raises:
        StartError: it is another word.
    """
    found = variables.get(name) or default
    if found not in allowed:
        where = name if variables.get(name) else f"the profile's value for {name}"
        raise StartError(f"{where} is {found!r}: use {', '.join(allowed[:-1])} or {allowed[-1]}")
    return found


def number(variables: Variables, name: str, default: float) -> float:
    """Return the value of a variable that takes a number, zero or more.

    Raises:
        StartError: it is none.
    """
    text = variables.get(name) or str(default)
    found = _float(text)
    if not 0 <= found < math.inf:
        raise StartError(f"{name} is {text!r}: use a number")
    return found


def share(variables: Variables) -> str:
    """Return the user's own share of memory, or "".

    Raises:
        StartError: it is no share.
    """
    name = "SPARKFORGE_GPU_MEMORY_UTILIZATION"
    text = variables.get(name, "")
    if text and not 0 < _float(text) <= 1:
        raise StartError(f"{name} is {text!r}: use a number above 0, and 1 at most")
    return text


def layers(variables: Variables) -> str:
    """Return ``SPARKFORGE_MXFP4_LAYERS``, or "". Which kinds there are, vLLM knows.

    Raises:
        StartError: it is no list of layers.
    """
    name = "SPARKFORGE_MXFP4_LAYERS"
    text = variables.get(name, "")
    if text and not re.fullmatch(r"[a-z_]+(=\w+)?( *, *[a-z_]+(=\w+)?)*", text):
        raise StartError(f"{name} is {text!r}: use a list like qkv,o,lm_head=mxfp8")
    return text


def max_jobs(variables: Variables) -> int | None:
    """Return the user's own number of compilers at once, or None.

    Raises:
        StartError: it is no number of them; FlashInfer would then start as many as there are CPUs.
    """
    text = variables.get("MAX_JOBS", "")
    if text and (not re.fullmatch("[0-9]{1,4}", text) or not int(text)):
        raise StartError(f"MAX_JOBS is {text!r}: use a whole number, 1 or more")
    return int(text) if text else None


def marks(variables: Variables) -> tuple[float, float, float]:
    """Return the memory guard's marks, in GiB.

    The default is an estimate: no Spark has run short under it. 4 is what compilers leave free, too
    (compilers.py).

    Raises:
        StartError: they are no three numbers that fall.
    """
    name = "SPARKFORGE_MEMORY_MARKS"
    text = variables.get(name) or "6,4,2"
    found = [_float(one) for one in text.split(",")]
    if len(found) != 3 or not math.inf > found[0] > found[1] > found[2] > 0:
        raise StartError(f"{name} is {text!r}: use three falling numbers of GiB, like 6,4,2")
    return found[0], found[1], found[2]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
