"""Tab completion in bash and zsh, by argcomplete.

The shell starts build.py with ``_ARGCOMPLETE`` and the line so far. Only the module of the command
on that line is imported.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from typing import NoReturn

import argcomplete
from argcomplete.lexers import split_line

from sparkforge.cli import overview
from sparkforge.cli.parser import Parser
from sparkforge.core.errors import SparkforgeError

VARIABLE = "_ARGCOMPLETE"
"""Set by the shell: the number of words of the line, up to and with the program."""


def complete(
    parser_of: Callable[[str], Parser], spelled_out: Callable[[list[str]], list[str]]
) -> NoReturn:
    """Write the words that can follow to the shell's descriptor, and end.

    Args:
        parser_of: gives the parser of one command.
        spelled_out: gives a command line with the names of its command in full.
    """
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    quote, begun, _, words, _ = split_line(line, point)
    before = words[int(os.environ[VARIABLE]) :]
    if "--" in before:
        os._exit(0)  # the rest is not ours
    # with the default command in place, so that its options are known
    *full, begun = spelled_out([*before, begun]) or [""]
    known = {name for group in overview.GROUPS.values() for name in group}
    parser = parser_of(full[0]) if full and full[0] in known else _commands()
    for command in parser.commands():
        for action in command._actions:
            if action.choices is None and action.dest in _NAMES:
                action.completer = _NAMES[action.dest]  # type: ignore[attr-defined]
    text = shlex.join(["build.py", *full]) + f" {quote}{begun}"
    os.environ |= {"COMP_LINE": text, "COMP_POINT": str(len(text)), VARIABLE: "1"}
    argcomplete.autocomplete(parser, always_complete_options="long")
    os._exit(0)  # autocomplete has ended by itself


def _commands() -> Parser:
    """Return a parser that knows the names of the commands, without their options."""
    parser = Parser(prog="build.py")
    for question in overview.QUESTIONS:
        parser.add_argument(question, action="store_true")
    top = parser.add_subparsers()
    for group in overview.GROUPS.values():
        for name, what in group.items():
            top.add_parser(name, help=what)
    return parser


def _targets(**_: object) -> Iterable[str]:
    return _named("targets")


def _upstreams(**_: object) -> Iterable[str]:
    return _named("upstreams")


def _named(what: str) -> Iterable[str]:
    from sparkforge.pins import pins
    from sparkforge.sources.project import ROOT

    try:
        return list(getattr(pins.load(ROOT / "pins.yaml"), what))
    except SparkforgeError:
        return []


_NAMES = {"target": _targets, "upstream": _upstreams}
"""Functions for values, by option or argument."""
