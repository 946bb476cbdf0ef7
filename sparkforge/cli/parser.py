"""Shared parts of commands: the parser, options as dataclasses, groups of options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_type_hints

from sparkforge.core.command import DEFAULTS, OPTION, Declared, Entry
from sparkforge.core.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]
else:
    Subparsers = argparse._SubParsersAction

T = TypeVar("T")


class Unrecognized(UsageError):
    """Options that a command does not have.

    Attributes:
        parser: the command's.
        options: the unknown ones, without their values.
    """

    def __init__(self, parser: Parser, arguments: Sequence[str]) -> None:
        self.parser = parser
        self.options = [word.partition("=")[0] for word in arguments]
        near = (_near(option, parser._option_string_actions) for option in self.options)
        hint = f"{next(filter(None, near), '')}see {parser.prog} --help"
        super().__init__(f"unrecognized arguments: {' '.join(arguments)}", hint)


class Parser(argparse.ArgumentParser):
    """argparse with errors in our form, and without abbreviated options."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is an error of the command that it follows.

        Raises:
            Unrecognized: an option is unknown; names the one that may have been meant.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise Unrecognized(self, unknown)
        return found, unknown

    def commands(self) -> Iterator[Parser]:
        """Yield the parsers of all commands below this one; itself if it has none."""
        below = [
            action for action in self._actions if isinstance(action, argparse._SubParsersAction)
        ]
        if not below:
            yield self
        for action in below:
            for parser in action.choices.values():
                yield from parser.commands()

    def options(self) -> Iterator[str]:
        """Yield the options that the help lists."""
        for action in self._actions:
            if action.help != argparse.SUPPRESS:
                yield from action.option_strings

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        what = f"argument {'/'.join(action.option_strings) or action.metavar or action.dest}"
        listed = f"use one of {', '.join(names)}"
        if action.dest == "command":
            listed = f"{self.prog} --help lists all commands"
        raise UsageError(f"{what}: invalid choice: {value!r}", _near(str(value), names) + listed)


def _near(word: str, names: Iterable[str]) -> str:
    """Return a question with the probable meaning of a misspelt word; "" if there is none."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def add_commands(
    parser: Parser, commands: Iterable[Entry], helps: Mapping[str, Mapping[str, str]]
) -> None:
    """Give a parser commands, each with the options that its dataclass declares.

    Args:
        helps: of the commands of one word, in groups.
    """
    top = _subparsers(parser, "command")
    families: dict[str, Subparsers] = {}
    known = {name: text for group in helps.values() for name, text in group.items()}
    for command in commands:
        first, _, action = command.name.partition(" ")
        if action and first not in families:
            family = top.add_parser(first, help=known[first])
            families[first] = _subparsers(family, "action")
        where = families[first] if action else top
        subparser = where.add_parser(
            action or first, help=command.help or known.get(first), description=command.description
        )
        add_options(subparser, command.options)
        subparser.set_defaults(entry=command)


def _subparsers(parser: Parser, name: str) -> Subparsers:
    return parser.add_subparsers(
        dest=name, required=True, metavar=name.upper(), parser_class=Parser
    )


def add_options(
    parser: argparse.ArgumentParser, kind: type[Any], defaults: Mapping[str, str] | None = None
) -> None:
    """Give a parser the options that a dataclass declares.

    Args:
        defaults: of a group in this command, as text.
    """
    groups = {str(group.title): group for group in parser._action_groups}
    exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            add_options(parser, hints[field.name], field.metadata.get(DEFAULTS))
            continue
        declared: Declared = field.metadata[OPTION]
        if declared.more is None:
            parser.set_defaults(**{field.name: field.default})
            continue
        if declared.group and declared.group not in groups:
            groups[declared.group] = parser.add_argument_group(declared.group)
        if declared.one_of and declared.one_of not in exclusive:
            exclusive[declared.one_of] = parser.add_mutually_exclusive_group()
        where: argparse._ActionsContainer = (
            groups.get(declared.group) or exclusive.get(declared.one_of) or parser
        )
        text = f"with {declared.needs}: {declared.help}" if declared.needs else declared.help
        if declared.default:
            text = f"{text} (default: {(defaults or {}).get(field.name, declared.default)})"
        more = dict(declared.more)
        if field.default is not MISSING:
            # argparse appends to a list
            more["default"] = (
                list(field.default) if more.get("action") == "append" else field.default
            )
        if declared.positional:
            names: tuple[str, ...] = (field.name,)
        else:
            names = _names(field)
            more["dest"] = field.name
        where.add_argument(*names, help=argparse.SUPPRESS if text is None else text, **more)


def _names(field: Field[Any]) -> tuple[str, ...]:
    """Return how an option is written."""
    declared: Declared = field.metadata[OPTION]
    return declared.names or (f"--{field.name.replace('_', '-')}",)


def from_namespace(kind: type[T], parsed: argparse.Namespace) -> T:
    """Return a command's options; a field that is a dataclass itself takes its fields.

    Raises:
        UsageError: an option is given without the one that it needs.
    """
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        inner: type[Any] = hints[field.name]
        if is_dataclass(inner):
            values[field.name] = from_namespace(inner, parsed)
        else:
            value = getattr(parsed, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    _check_needs(kind, values)
    return kind(**values)


def _check_needs(kind: type[Any], values: Mapping[str, Any]) -> None:
    options = {_names(field)[0]: field for field in fields(kind) if OPTION in field.metadata}
    given = {name for name, field in options.items() if values[field.name] != field.default}
    for name in sorted(given):
        needs = options[name].metadata[OPTION].needs
        if needs and needs not in given:
            more = options[needs].metadata[OPTION].more
            value = "" if "nargs" in more else more.get("metavar", "")
            raise UsageError(f"{name} needs {needs}", f"add {needs} {value}".strip())
