"""docs/architecture.md agrees with the imports and calls in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "sparkforge"
MODULES = {path.relative_to(ROOT).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
# beside run.py: in the image, and in front of a compiler, where nothing else of sparkforge is
STARTS_PROCESSES = {"core/run.py", "serving/supervise.py", "build/compile/gate.py"}
PRINTS = {"serving/supervise.py"}  # log.py writes to its streams itself


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


def test_imports_point_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        wanted = {place(one) for one in imports(path)} - {place(module)}
        graph.setdefault(place(module), set()).update(wanted)
    TopologicalSorter(graph).prepare()  # a cycle is an error that names it


def test_what_the_image_copies_needs_nothing_else() -> None:
    inside = [path for module, path in MODULES.items() if place(module) == "serving"]
    assert inside
    for path in inside:
        assert {place(one) for one in imports(path)} <= {"serving"}, path


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
