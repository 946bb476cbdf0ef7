"""What commands share: the parser itself, kinds of values, groups of options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from sparkforge.core.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]
else:
    Subparsers = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """argparse whose complaints look like all our errors, and whose options are written out."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is an error of the command that it follows.

        Raises:
            UsageError: an option is unknown; names the one that may have been meant.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = (word.partition("=")[0] for word in unknown)
            guess = next(
                filter(None, (_near(one, self._option_string_actions) for one in options)), ""
            )
            remedy = f"{guess}see {self.prog} --help"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", remedy)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(one) for one in action.choices]
        what = f"argument {'/'.join(action.option_strings) or action.metavar or action.dest}"
        listed = f"use one of {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            listed = f"{self.prog} --help lists all commands"
        raise UsageError(f"{what}: invalid choice: {value!r}", _near(str(value), names) + listed)


def _near(word: str, names: Iterable[str]) -> str:
    """Return a question that names what a misspelt word may mean; "" where nothing is near."""
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def later(module: str) -> Callable[[argparse.Namespace], int]:
    """Return a module's ``run``, imported when the command runs: no other command needs it."""

    def run(options: argparse.Namespace) -> int:
        code: int = import_module(module).run(options)
        return code

    return run


class Parents(NamedTuple):
    """Groups of options that several commands have, as argparse's ``parents``."""

    shared: Parser
    """Of every command: store, JSON, verbose."""
    sources: Parser
    """Of commands that fetch: offline, mirrors."""
    target: Parser
    """Of commands about one target: its name, engine, base, server."""


def parents() -> Parents:
    """Return the groups; argparse copies from them, so one of each serves all commands."""
    return Parents(_shared_options(), _sources_options(), target_options())


def _shared_options() -> Parser:
    shared = Parser(add_help=False)
    group = shared.add_argument_group("store and output")
    group.add_argument("--pins", type=Path, default=None, metavar="FILE", help=argparse.SUPPRESS)
    group.add_argument(
        "--store",
        type=Path,
        default=None,
        metavar="DIR",
        help="cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON document to stdout, even on failure"
    )
    group.add_argument(
        "-v", "--verbose", action="store_true", help="print every command that is run"
    )
    return shared


def _sources_options() -> Parser:
    sources = Parser(add_help=False)
    group = sources.add_argument_group("network")
    group.add_argument("--offline", action="store_true", help="use no network, only the store")
    group.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="UPSTREAM=URL-or-path",
        help="fetch this upstream's commit from here; may be repeated",
    )
    return sources


def target_options(*, required: bool = True, serves: bool = True) -> Parser:
    """Options of one target.

    Args:
        required: whether it must be named.
        serves: whether the command starts a server; the server's options are taken without an
            effect where it does not, and its help leaves them out.
    """
    target = Parser(add_help=False)
    group = target.add_argument_group("target")
    group.add_argument(
        "--target", required=required, metavar="NAME", help="target to build, from pins.yaml"
    )
    source_option(
        target, "targets.NAME.source in pins.yaml; smoke, serve …: that of the last build"
    )
    _image_options(target)
    _wheel_options(target)
    _server_options(target, hidden=not serves)
    return target


def source_option(parser: argparse.ArgumentParser, default: str) -> None:
    """The option of commands that choose between git commits and release files."""
    parser.add_argument_group("sources").add_argument(
        "--source",
        choices=("release", "git", "auto"),
        default=None,
        help="release: release files; git: commits of the pinned tags; auto: git, or the release"
        f" file if git is unreachable (default: {default})",
    )


def _image_options(target: Parser) -> None:
    group = target.add_argument_group("image")
    group.add_argument(
        "--engine",
        choices=("auto", "docker", "none"),
        default="auto",
        help="container engine; none: a virtual environment (default: auto)",
    )
    group.add_argument("--base", metavar="IMAGE", help="base image: NAME@sha256:… or a local image")
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


def _wheel_options(target: Parser) -> None:
    group = target.add_argument_group("wheels")
    group.add_argument(
        "--wheels",
        choices=("overlay", "compile"),
        default=None,
        help="overlay: replace the patched files in the release wheel; compile: build from the"
        " patched tree in a container (default: overlay; smoke, serve …: that of the last build)",
    )
    group.add_argument(
        "--native",
        choices=("patched", "all"),
        default=None,
        help="with --wheels compile: compile patched native files only, or all (default: patched)",
    )
    group.add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="with --wheels compile: parallel compilers (default: as many as fit in memory)",
    )


def _server_options(target: Parser, *, hidden: bool) -> None:
    group = target.add_argument_group("server")
    group.add_argument(
        "--port",
        type=port,
        default=0,
        metavar="N",
        help=argparse.SUPPRESS if hidden else "loopback port (default: a free port; serve: 8000)",
    )
    group.add_argument(
        "--ready-timeout",
        type=positive,
        default=None,
        metavar="SECONDS",
        help=argparse.SUPPRESS
        if hidden
        else "time limit of the server's start (default: 300; serve: none)",
    )


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


def generated(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of a command that writes a generated page."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--docs", action="store_true", help=f"write {what}")
    how.add_argument("--check", action="store_true", help=f"fail if {what} are stale")
