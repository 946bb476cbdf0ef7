"""Every command takes the options that its code reads, and no others."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from sparkforge.build.options import OutputOptions, ServerOptions
from sparkforge.cli.main import _parser
from sparkforge.cli.parser import Parser, add_options, from_namespace
from sparkforge.core.command import (
    OPTION,
    Entry,
    argument,
    behind,
    grouped,
    needed,
    option,
    repeated,
    switch,
)
from sparkforge.core.errors import UsageError

COMMANDS: Mapping[str, Parser] = {
    parser.prog.removeprefix("build.py "): parser for parser in _parser().commands()
}
READ_BY_MAIN = {"output.json", "output.verbose"}


def leaves(kind: type[Any], at: str = "") -> Iterator[str]:
    """Give the path of every option that a dataclass holds."""
    for field in fields(kind):
        inner = get_type_hints(kind)[field.name]
        if isinstance(inner, type) and is_dataclass(inner):
            yield from leaves(inner, f"{at}{field.name}.")
        else:
            yield f"{at}{field.name}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_each_of_its_options(command: str) -> None:
    entry: Entry = COMMANDS[command]._defaults["entry"]
    kind, run = entry.options, entry.run
    assert kind.__dataclass_params__.frozen
    (parameter,) = inspect.signature(run).parameters
    assert set(leaves(kind)) - reads(run, parameter, kind) <= READ_BY_MAIN


# -- which options a function reads ---------------------------------------------------------


def reads(function: Callable[..., Any], parameter: str, kind: type[Any]) -> frozenset[str]:
    """Return the paths of the options that a function reads, itself or in what it calls.

    Args:
        parameter: the one that holds the options.
        kind: the dataclass of the options.
    """
    tree, known = read(inspect.unwrap(function))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and chain(node)[:1] == [parameter]:
            path = chain(node)[1:]
            found |= {".".join(path)} & set(leaves(kind)) | by_method(path, kind)
        elif isinstance(node, ast.Call):
            function = called(node.func, known)
            for place, value in handed(node):
                if chain(value)[:1] == [parameter]:
                    found |= by_call(function, place, chain(value)[1:], kind)
                elif isinstance(value, ast.Call):  # f(BuildOptions(project=options.project))
                    made = called(value.func, known)
                    if isinstance(made, type) and is_dataclass(made):
                        below = by_call(function, place, [], made)
                        found |= through(value, parameter, below)
    return frozenset(found)


def through(made: ast.Call, parameter: str, below: set[str]) -> set[str]:
    """Return which options are read where a dataclass is made of some, and its paths are read."""
    found = set()
    for place, value in handed(made):
        if chain(value)[:1] == [parameter]:
            path = ".".join(chain(value)[1:])
            found |= {
                f"{path}{one.removeprefix(str(place))}"
                for one in below
                if one == place or one.startswith(f"{place}.")
            }
    return found


@cache
def read(function: Callable[..., Any]) -> tuple[ast.Module, Mapping[str, Any]]:
    """Return a function's source, and what names stand for in it: its module's, its imports."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = dict(getattr(function, "__globals__"))  # noqa: B009 - a method has none for mypy
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return tree, found


def called(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return what an expression names; None where that is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(called(node.value, known), node.attr, None)
    return None


def chain(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; nothing for another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain(node.value)):
        return [*before, node.attr]
    return []


def handed(node: ast.Call) -> list[tuple[int | str, ast.expr]]:
    """Return the arguments of a call, by place or name."""
    return [*enumerate(node.args), *((word.arg or "", word.value) for word in node.keywords)]


def group(path: list[str], kind: type[Any]) -> type[Any] | None:
    """Return the dataclass at a path; None for an option itself."""
    for name in path:
        kind = get_type_hints(kind).get(name, object)
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def by_method(path: list[str], kind: type[Any]) -> set[str]:
    """Return what the method of a group reads that a path ends with."""
    *before, name = path
    inner = group(before, kind)
    method = getattr(inner, name, None)
    if inner is None or not inspect.isfunction(method):
        return set()
    return {".".join([*before, below]) for below in reads(method, "self", inner)}


def by_call(function: Any, place: int | str, path: list[str], kind: type[Any]) -> set[str]:
    """Return what a function reads of a group that it takes."""
    inner = group(path, kind)
    if inner is None or function is replace:
        return set()
    if isinstance(function, type) and is_dataclass(function):
        return set()  # see through()
    if function is asdict:
        return {".".join([*path, below]) for below in leaves(inner)}
    assert callable(function), f"no function is known that takes {path}"
    parameter = (
        place if isinstance(place, str) else list(inspect.signature(function).parameters)[place]
    )
    function = getattr(function, "__func__", function)
    return {".".join([*path, below]) for below in reads(function, parameter, inner)}


# -- the checks themselves -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Options of each kind."""

    file: Path = argument("a file", type=Path)
    name: str = needed("a name")
    tag: tuple[str, ...] = repeated("tags")
    quiet: bool = switch("say nothing", "-q", "--quiet")
    one: str | None = option("one", one_of="ones")
    other: str | None = option("the other", one_of="ones")
    hidden: str | None = option(None)
    arguments: tuple[str, ...] = behind()
    server: ServerOptions = grouped(port="8000")


@dataclass(frozen=True)
class Sample:
    """Options that the functions below read in different ways."""

    name: str
    count: int
    files: tuple[Path, ...]
    server: ServerOptions
    output: OutputOptions

    def both(self) -> str:
        return self.name * self.count


def _port(server: ServerOptions) -> int:
    return server.port


def _by_method(options: Sample) -> str:
    return options.both()


def _by_call(options: Sample) -> int:
    return _port(options.server)


def _by_name(options: Sample) -> int:
    return _port(server=options.server)


def _by_lambda(options: Sample) -> Callable[[], int]:
    return lambda: options.count


def _by_another(options: Sample) -> int:
    return _by_call(
        Sample(name="", count=1, files=(), server=options.server, output=options.output)
    )


def _whole(options: Sample) -> object:
    return asdict(options.output)


def _nothing(options: Sample) -> object:
    return replace(options.server, port=1), options.output == OutputOptions()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_by_method, {"name", "count"}),
        (_by_call, {"server.port"}),
        (_by_name, {"server.port"}),
        (_by_lambda, {"count"}),
        (_by_another, {"server.port"}),
        (_whole, {"output.json", "output.verbose"}),
        (_nothing, set()),
    ],
)
def test_an_option_counts_as_read_where_it_is(
    function: Callable[..., Any], expected: set[str]
) -> None:
    assert reads(function, "options", Sample) == expected


def test_fields_say_what_argparse_gets() -> None:
    parser = Parser(prog="x")
    add_options(parser, Declared)
    found = from_namespace(
        Declared, parser.parse_args(["a.txt", "--name", "n", "--tag", "1", "--tag", "2", "-q"])
    )
    assert found == Declared(
        file=Path("a.txt"), name="n", tag=("1", "2"), quiet=True, server=ServerOptions()
    )
    with pytest.raises(UsageError, match="--name"):
        parser.parse_args(["a.txt"])
    with pytest.raises(UsageError, match="not allowed with"):
        parser.parse_args(["a.txt", "--name", "n", "--one", "1", "--other", "2"])
    text = " ".join(parser.format_help().split())
    assert "server: --port N loopback port (default: 8000)" in text
    assert "--ready-timeout SECONDS time limit of the server's start (default: 300)" in text
    assert "--hidden" not in text


@dataclass(frozen=True, kw_only=True)
class Dependent:
    """Options of which one needs another."""

    url: str | None = option("server", metavar="URL")
    fast: bool = switch("at once")
    model: str | None = option("its model", needs="--url")
    level: float | None = option("how fast", needs="--fast", type=float)


def test_an_option_says_which_other_it_needs() -> None:
    parser = Parser(prog="x")
    add_options(parser, Dependent)

    def given(*words: str) -> Dependent:
        return from_namespace(Dependent, parser.parse_args(words))

    assert "with --url: its model" in parser.format_help()
    assert given("--url", "u", "--model", "m").model == "m"
    assert given().model is None
    with pytest.raises(UsageError, match=r"--model needs --url\n  hint: add --url URL$"):
        given("--model", "m")
    with pytest.raises(UsageError, match=r"--level needs --fast\n  hint: add --fast$"):
        given("--level", "0")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_needs_one_beside_it(command: str) -> None:
    kind = COMMANDS[command]._defaults["entry"].options
    groups = [kind, *(one for one in get_type_hints(kind).values() if is_dataclass(one))]
    for group in groups:
        options = [field for field in fields(group) if OPTION in field.metadata]
        known = {f"--{field.name.replace('_', '-')}" for field in options}
        assert {field.metadata[OPTION].needs for field in options} <= {"", *known}


def test_a_field_without_a_declaration_is_an_error() -> None:
    with pytest.raises(KeyError):
        add_options(Parser(), Sample)
