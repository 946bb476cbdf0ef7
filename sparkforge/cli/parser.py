"""What commands share: the parser itself, options as dataclasses, groups of options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, get_type_hints

from sparkforge.core.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]
else:
    Subparsers = argparse._SubParsersAction

T = TypeVar("T")
Entry = Callable[[], tuple[type[Any], Callable[[Any], int]]]
"""Gives the dataclass of a command's options, and the function that takes one."""
CHOOSES = ("command", "action", "entry")
"""What a parsed command line holds beside options: which command it is."""


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
    """argparse whose complaints look like all our errors, and whose options are written out."""

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
        below = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
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
        names = [str(one) for one in action.choices]
        what = f"argument {'/'.join(action.option_strings) or action.metavar or action.dest}"
        listed = f"use one of {', '.join(names)}"
        if action.dest == "command":
            listed = f"{self.prog} --help lists all commands"
        raise UsageError(f"{what}: invalid choice: {value!r}", _near(str(value), names) + listed)


def _near(word: str, names: Iterable[str]) -> str:
    """Return a question that names what a misspelt word may mean; "" where nothing is near."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def here(kind: type[T], run: Callable[[T], int]) -> Entry:
    """Return the entry of a command: a dataclass, and a function of it."""
    return lambda: (kind, run)


def later(module: str) -> Entry:
    """Return a module's ``Options`` and ``run``, imported when the command runs."""

    def load() -> tuple[type[Any], Callable[[Any], int]]:
        found = import_module(module)
        return found.Options, found.run

    return load


def from_namespace(kind: type[T], parsed: argparse.Namespace) -> T:
    """Return a command's options; a field that is a dataclass itself takes its fields.

    Raises:
        TypeError: an option has no field, or a field no option.
    """
    given = {name: value for name, value in vars(parsed).items() if name not in CHOOSES}
    found = _filled(kind, given)
    if given:
        msg = f"{kind.__module__}.{kind.__qualname__}: no field for {', '.join(given)}"
        raise TypeError(msg)
    return found


def _filled(kind: type[T], given: dict[str, Any]) -> T:
    """Return a dataclass filled with options, which are taken out of ``given``."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        inner: type[Any] = hints[field.name]
        if is_dataclass(inner):
            values[field.name] = _filled(inner, given)
        elif field.name in given:
            value = given.pop(field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        else:
            msg = f"{kind.__module__}.{kind.__qualname__}: no option for {field.name}"
            raise TypeError(msg)
    return kind(**values)


class Parents(NamedTuple):
    """Groups of options that several commands have, as argparse's ``parents``.

    ``project`` is the first three; each group fills the dataclass of its name in
    ``build/options.py``.
    """

    pins: Parser
    store: Parser
    network: Parser
    output: Parser
    variant: Parser
    last_variant: Parser
    tools: Parser
    server: Parser

    @property
    def project(self) -> list[Parser]:
        """The groups of commands that fetch sources."""
        return [self.store, self.output, self.network, self.pins]


def parents() -> Parents:
    """Return the groups; argparse copies from them, so one of each serves all commands."""
    return Parents(
        _pins_option(),
        _store_option(),
        _network_options(),
        _output_options(),
        _variant_options(last=False),
        _variant_options(last=True),
        _tool_options(),
        server_options("a free port", "300"),
    )


def _pins_option() -> Parser:
    pins = Parser(add_help=False)
    pins.add_argument("--pins", type=Path, default=None, metavar="FILE", help=argparse.SUPPRESS)
    return pins


def _store_option() -> Parser:
    store = Parser(add_help=False)
    store.add_argument_group("store and output").add_argument(
        "--store",
        type=Path,
        default=None,
        metavar="DIR",
        help="cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)",
    )
    return store


def _output_options() -> Parser:
    output = Parser(add_help=False)
    group = output.add_argument_group("store and output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON document to stdout, even on failure"
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="print every command that is run"
    )
    return output


def _network_options() -> Parser:
    network = Parser(add_help=False)
    group = network.add_argument_group("network")
    group.add_argument("--offline", action="store_true", help="use no network, only the store")
    group.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="UPSTREAM=URL-or-path",
        help="fetch this upstream's commit from here; may be repeated",
    )
    return network


def source_option(parser: argparse.ArgumentParser, default: str) -> None:
    """The option of commands that choose between git commits and release files."""
    parser.add_argument_group("sources").add_argument(
        "--source",
        choices=("release", "git", "auto"),
        default=None,
        help="release: release files; git: commits of the pinned tags; auto: git, or the release"
        f" file if git is unreachable (default: {default})",
    )


def _variant_options(*, last: bool) -> Parser:
    """What decides which build of a target it is.

    Args:
        last: the last build's is the default.
    """
    variant = Parser(add_help=False)
    as_last = "as in the last build"
    source_option(variant, as_last if last else "targets.NAME.source in pins.yaml")
    group = variant.add_argument_group("image")
    group.add_argument(
        "--engine",
        choices=("auto", "docker", "none"),
        default="auto",
        help="container engine; none: a virtual environment"
        f" (default: {as_last if last else 'auto'})",
    )
    group.add_argument("--base", metavar="IMAGE", help="base image: NAME@sha256:… or a local image")
    group = variant.add_argument_group("wheels")
    group.add_argument(
        "--wheels",
        choices=("overlay", "compile"),
        default=None,
        help="overlay: replace the patched files in the release wheel; compile: build from the"
        f" patched tree in a container (default: {as_last if last else 'overlay'})",
    )
    group.add_argument(
        "--native",
        choices=("patched", "all"),
        default=None,
        help="with --wheels compile: compile patched native files only, or all"
        f" (default: {as_last if last else 'patched'})",
    )
    return variant


def _tool_options() -> Parser:
    """What a build works with, and what its result does not depend on."""
    tools = Parser(add_help=False)
    group = tools.add_argument_group("image")
    group.add_argument(
        "--builder", metavar="NAME", help="buildx builder (default: the engine's own)"
    )
    group.add_argument(
        "--ca-bundle",
        type=Path,
        metavar="FILE",
        default=None,
        help="CA certificates for the image's build steps, for example of a proxy",
    )
    tools.add_argument_group("wheels").add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="with --wheels compile: parallel compilers (default: as many as fit in memory)",
    )
    return tools


def server_options(port_default: str, timeout_default: str) -> Parser:
    """Options of a server that the command starts."""
    server = Parser(add_help=False)
    group = server.add_argument_group("server")
    group.add_argument(
        "--port",
        type=port,
        default=0,
        metavar="N",
        help=f"loopback port (default: {port_default})",
    )
    group.add_argument(
        "--ready-timeout",
        type=positive,
        default=None,
        metavar="SECONDS",
        help=f"time limit of the server's start (default: {timeout_default})",
    )
    return server


def port(text: str) -> int:
    """A TCP port, 0 for a free one."""
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        msg = f"{text!r} is not a port: use 0 to 65535"
        raise argparse.ArgumentTypeError(msg)
    return port


def _number(text: str) -> float:
    """Return a number; what is none gives one that no bounds let in."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def share(text: str) -> float:
    """A finite number from 0."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        msg = f"{text!r} is not a number of at least 0"
        raise argparse.ArgumentTypeError(msg)
    return number


def count(text: str) -> int:
    """A whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= 10**9:
        msg = f"{text!r} is not a whole number from 1 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number


def positive(text: str) -> float:
    """A number that can be divided by."""
    number = _number(text)
    if not 1e-6 <= number <= 1e9:  # what is beyond divides to nothing, or to infinity
        msg = f"{text!r} is not a number from 10^-6 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number
