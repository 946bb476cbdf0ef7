"""Commands as data: a frozen dataclass declares the options that ``cli/parser.py`` registers.

A field's default declares the option: ``target: str = needed("target to build", metavar="NAME")``.
A field that is a dataclass of options adds all of them. Each field's name is the option's, and
further keywords are those of argparse's ``add_argument``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any

OPTION = "option"
"""Key of a field's ``Declared`` in its metadata."""
DEFAULTS = "defaults"
"""Key of the defaults that a group has in a command, as text, in the metadata of its field."""


@dataclass(frozen=True)
class Entry:
    """One command."""

    name: str
    """As on the command line, such as ``patches check``."""
    options: type[Any]
    run: Callable[[Any], int]
    """Takes an instance of ``options``, and returns the exit code."""
    help: str = ""
    """For the list of its group's commands; ``cli/overview.py`` has those of single words."""
    description: str | None = None
    """Above its own help."""


@dataclass(frozen=True)
class Declared:
    """An option for argparse."""

    names: tuple[str, ...] = ()
    """On the command line; empty: its field's name, or an argument's place."""
    help: str | None = None
    """None: it is not listed."""
    group: str = ""
    """Title above it in the command's help; "": none."""
    one_of: str = ""
    """Options with the same name here exclude each other; "": none."""
    needs: str = ""
    """The option that it requires, such as ``--url``; "": none."""
    default: str = ""
    """Its default as text, where commands differ; "": part of ``help``, or obvious."""
    more: Mapping[str, Any] | None = None
    """Further keywords of ``add_argument``; None: the arguments after ``--``."""
    positional: bool = False


def option(
    help: str | None,
    *names: str,
    default: Any = None,
    group: str = "",
    one_of: str = "",
    needs: str = "",
    default_is: str = "",
    **more: Any,
) -> Any:
    """Declare an option; arguments as in ``Declared``."""
    declared = Declared(names, help, group, one_of, needs, default_is, more)
    return field(default=default, metadata={OPTION: declared})


def needed(help: str, **more: Any) -> Any:
    """Declare a required option."""
    return option(help, default=MISSING, required=True, **more)


def switch(help: str, *names: str, **more: Any) -> Any:
    """Declare an option without a value; False by default."""
    return option(help, *names, default=False, action="store_true", **more)


def repeated(help: str, **more: Any) -> Any:
    """Declare an option that can be repeated: a tuple."""
    return option(help, default=(), action="append", **more)


def argument(help: str = "", *, default: Any = MISSING, **more: Any) -> Any:
    """Declare a positional argument; optional with a default."""
    return field(default=default, metadata={OPTION: Declared((), help, more=more, positional=True)})


def behind() -> Any:
    """Declare the arguments after ``--``: a tuple."""
    return field(default=(), metadata={OPTION: Declared()})


def grouped(**defaults: str) -> Any:
    """Declare a group of options with this command's own defaults, as text for its help."""
    return field(metadata={DEFAULTS: defaults})


# -- values ----------------------------------------------------------------------------------


def port(text: str) -> int:
    """Return a TCP port, 0 for a free one."""
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 0 to 65535")
    return port


def _number(text: str) -> float:
    """Return a number; NaN, which is within no bounds, for other text."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def share(text: str) -> float:
    """Return a finite number from 0."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def count(text: str) -> int:
    """Return a whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10^9")
    return number


def positive(text: str) -> float:
    """Return a number to divide by."""
    number = _number(text)
    if not 1e-6 <= number <= 1e9:  # a quotient beyond could be 0 or infinite
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 10^-6 to 10^9")
    return number
