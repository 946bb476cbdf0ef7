"""Layers, cycles, and the modules that start processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "sparkforge"
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
# beside run.py: in the image and in its build, where nothing else of sparkforge is
STARTS_PROCESSES = {
    "core/run.py",
    "serving/door.py",
    "serving/image_build.py",
    "serving/supervise.py",
}
STARTING = re.compile(
    r"subprocess\.(Popen|run|call|check_\w+|get\w*output)"
    r"|os\.(exec|spawn|posix_spawn|fork|system|popen)\w*|pty\.\w+"
    r"|(.*\.)?(multiprocessing\..+|ProcessPoolExecutor)"
)
"""Calls that start a process, or become another program."""
_BASE = {"core", "store", "pins"}
_BUILD = {*_BASE, "sources", "series", "wheels", "runtime", "checkpoints", "serving"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "store": {"core"},
    "pins": {"core", "serving"},  # a profile is read by both
    "checkpoints": {"serving"},  # tiny.py writes what serving/preflight.py reads
    "runtime": {"core", "store"},
    "sources": _BASE,
    "series": {*_BASE, "sources"},
    "wheels": {*_BASE, "sources", "series"},
    "build": _BUILD,
    "release": {*_BUILD, "build"},
    "check": {*_BUILD, "build", "release"},
    "maintain": {*_BUILD, "build"},
    "cli": {*_BUILD, "build", "check", "maintain", "release"},
    "serving": set(),  # the image copies it, and nothing else
}
"""What the modules of each package may import beside those of their own."""


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a module, but for what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


def imports(path: Path, *, types: bool = False) -> set[tuple[str, ...]]:
    """Return the modules of sparkforge that a module imports, at its top or later.

    Args:
        types: with those that only a type checker reads.
    """
    found = set()
    for node in (ast.walk if types else nodes)(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in (tuple(one.split(".")) for one in names if one.startswith("sparkforge.")):
            found.add(name if name in MODULES else name[:-1])
    return found


def test_every_package_imports_only_what_its_layer_allows() -> None:
    assert {module[1] for module in MODULES} == {*ALLOWED, "__init__", "__main__"}
    for module, path in MODULES.items():
        wanted = {one[1] for one in imports(path, types=True) if len(one) > 1}
        allowed = {*ALLOWED.get(module[1], ALLOWED), module[1], "__init__"}
        assert wanted <= allowed, ".".join(module)


def test_nothing_is_imported_in_a_circle() -> None:
    TopologicalSorter(ALLOWED).prepare()  # a cycle is an error that names it
    TopologicalSorter({module: imports(path) for module, path in MODULES.items()}).prepare()


def test_processes_start_in_few_modules() -> None:
    calls = {
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func))
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {name for name, called in calls if STARTING.fullmatch(called)} == STARTS_PROCESSES
