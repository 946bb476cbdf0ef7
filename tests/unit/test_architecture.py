"""docs/architecture.md agrees with the imports and calls in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "sparkforge"
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
# beside run.py: in the image, in its build, and in front of a compiler, where nothing else of
# sparkforge is
STARTS_PROCESSES = {
    "core/run.py",
    "serving/session.py",
    "serving/triton_driver.py",
    "build/compile/gate.py",
}
PRINTS = {"serving/log.py"}  # log.py writes to its streams itself
LONGEST = 400  # lines
_BASE = {"core", "store", "pins"}
_BUILD = {*_BASE, "sources", "series", "wheels", "runtime", "checkpoints", "serving"}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "store": {"core"},
    "pins": {"core"},
    "checkpoints": {"serving"},  # trial.py writes what serving/preflight.py reads
    "runtime": {"core", "store"},
    "sources": _BASE,
    "series": {*_BASE, "sources"},
    "wheels": {*_BASE, "sources", "series"},
    "build": _BUILD,
    "inspect": {*_BUILD, "build"},
    "maintain": {*_BUILD, "build"},
    "release": {*_BUILD, "build", "inspect"},
    "cli": {*_BUILD, "build", "inspect", "maintain", "release"},
    "serving": set(),  # the image copies it, and nothing else
}
"""What the modules of each package may import beside those of their own."""


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a module, but for what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


def imports(path: Path) -> set[tuple[str, ...]]:
    """Return the modules of sparkforge that a module imports, at its top or later."""
    found = set()
    for node in nodes(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in (tuple(one.split(".")) for one in names if one.startswith("sparkforge.")):
            found.add(name if name in MODULES else name[:-1])
    return found


def place(module: tuple[str, ...]) -> str:
    """Return the folder of sparkforge/ that a module is in; of one beside them, the module."""
    return module[1] if len(module) > 1 else module[0]


def forbidden(package: str, wanted: set[str]) -> set[str]:
    """Return which of the packages that a package's module imports it may not import."""
    return wanted - ALLOWED[package] - {package, "sparkforge"}


def test_every_package_imports_only_what_its_layer_allows() -> None:
    inside = {module: path for module, path in MODULES.items() if len(module) > 2}
    assert {place(module) for module in inside} == set(ALLOWED)
    assert {module[1] for module in set(MODULES) - set(inside)} == {"__init__", "__main__"}
    for module, path in inside.items():
        wanted = {place(one) for one in imports(path)}
        assert not forbidden(place(module), wanted), ".".join(module)


def test_a_layer_that_reaches_up_is_seen() -> None:
    assert forbidden("series", {"checkpoints", "core"}) == {"checkpoints"}
    assert forbidden("serving", {"core"}) == {"core"}
    assert forbidden("core", {"core"}) == set()


def test_the_layers_have_no_cycle() -> None:
    TopologicalSorter(ALLOWED).prepare()  # a cycle is an error that names it


def test_no_module_is_imported_in_a_circle() -> None:
    TopologicalSorter({module: imports(path) for module, path in MODULES.items()}).prepare()


def test_no_module_is_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES.values()}
    assert {str(path): count for path, count in lengths.items() if count > LONGEST} == {}


def test_the_monopolies_hold() -> None:
    starts, prints = set(), set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("subprocess.Popen", "subprocess.run", "os.fork", "os.execv", "os.system"):
                starts.add(path.relative_to(PACKAGE).as_posix())
            elif called == "print":
                prints.add(path.relative_to(PACKAGE).as_posix())
    assert starts == STARTS_PROCESSES
    assert prints == PRINTS


def test_unit_tests_lie_in_the_folders_of_packages() -> None:
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert folders
    assert folders <= set(ALLOWED)
