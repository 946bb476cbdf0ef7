"""What commands share: the parser itself, kinds of values, groups of options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from sparkforge.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["Parser"]
else:
    Subparsers = argparse._SubParsersAction


class Parser(argparse.ArgumentParser):
    """argparse whose complaints look like all our errors, and whose options are written out."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"{self.prog} --help shows what is possible")


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
    shared.add_argument("--pins", type=Path, default=None, metavar="FILE", help=argparse.SUPPRESS)
    shared.add_argument(
        "--store",
        type=Path,
        default=None,
        metavar="DIR",
        help="cache folder (SPARKFORGE_STORE, else ~/.cache/sparkforge)",
    )
    shared.add_argument("--json", action="store_true", help="one JSON document on stdout")
    shared.add_argument("-v", "--verbose", action="store_true", help="echo every command")
    return shared


def _sources_options() -> Parser:
    sources = Parser(add_help=False)
    sources.add_argument("--offline", action="store_true", help="use only what the store holds")
    sources.add_argument(
        "--mirror",
        action="append",
        default=[],
        metavar="UPSTREAM=URL-or-path",
        help="take an upstream's git commit from here",
    )
    return sources


def target_options(*, required: bool = True) -> Parser:
    """Options of one target; ``required``: whether it must be named."""
    target = Parser(add_help=False)
    target.add_argument(
        "--target", required=required, metavar="NAME", help="what to build for whom"
    )
    target.add_argument(
        "--engine",
        choices=("auto", "docker", "none"),
        default="auto",
        help="container engine; none: a plain environment (default: auto)",
    )
    target.add_argument("--base", metavar="IMAGE", help="base image: NAME@sha256:… or a local one")
    target.add_argument("--builder", metavar="NAME",
                        help="buildx builder of the image (default: the engine's own)")  # fmt: skip
    target.add_argument(
        "--ca-bundle",
        type=Path,
        metavar="FILE",
        default=None,
        help="certificates of a company proxy, for the image's build steps",
    )
    target.add_argument(
        "--wheels",
        choices=("overlay", "compile"),
        default=None,
        help="overlay: the release wheel with the patched files put in place; compile: built from"
        " the patched tree, in a container (default: overlay; smoke, serve …: as built last)",
    )
    target.add_argument(
        "--native",
        choices=("patched", "all"),
        default=None,
        help="with --wheels compile: native files that a patch touches, or all (default: patched)",
    )
    target.add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="with --wheels compile: compilers at once (default: as many as memory holds)",
    )
    target.add_argument("--port", type=port, default=0, help="loopback port (default: a free one)")
    target.add_argument(
        "--ready-timeout",
        type=positive,
        default=300.0,
        metavar="SECONDS",
        help="how long a server may load (default: 300)",
    )
    return target


def port(text: str) -> int:
    """A TCP port, 0 for a free one."""
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        msg = f"{text!r} is no port: use 0 to 65535"
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
        msg = f"{text!r} is no number from 0"
        raise argparse.ArgumentTypeError(msg)
    return number


def count(text: str) -> int:
    """A whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= 10**9:
        msg = f"{text!r} is no number from 1 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number


def positive(text: str) -> float:
    """A number that can be divided by."""
    number = _number(text)
    if not 1e-6 <= number <= 1e9:  # what is beyond divides to nothing, or to infinity
        msg = f"{text!r} is no number from 10^-6 to 10^9"
        raise argparse.ArgumentTypeError(msg)
    return number


def generated(parser: argparse.ArgumentParser, what: str) -> None:
    """The options of a command that writes a generated page."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--docs", action="store_true", help=f"write {what}")
    how.add_argument("--check", action="store_true", help=f"fail where {what} are stale")
