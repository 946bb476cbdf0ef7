"""The dev loop: edits act at once, dates stay, what was written goes back as patches."""

import json
import os
from pathlib import Path

import pytest

from tests.integration.worktrees import Tree
from tests.kernels import toolchain, with_kernels
from tests.project import PATCH, PATCHED

OLD = 1_600_000_000


@pytest.fixture
def dev(tree: Tree, tmp_path: Path) -> Tree:
    """The project's work tree as `dev` made it, all of its files long ago."""
    made = Tree(tree.project, tmp_path / "my trees" / "demo", tree.told)
    assert loop(made, "true") == ""
    for name in made.git("ls-files").splitlines():
        os.utime(made.path / name, (OLD, OLD))
    return made


def loop(dev: Tree, *command: str, code: int = 0, words: tuple[str, ...] = ()) -> str:
    """Run a command in the loop; returns what it printed."""
    out, _ = told(dev, *command, code=code, words=words)
    return out.splitlines()[-1] if command[0] != "true" else ""


def told(dev: Tree, *command: str, code: int = 0, words: tuple[str, ...] = ()) -> tuple[str, str]:
    place = ("--target", "tiny", "--engine", "none", "--dir", str(dev.path.parent))
    return dev.project.run("dev", *place, *words, "--", *command, code=code)


def dates(dev: Tree) -> dict[str, int]:
    return {name: int((dev.path / name).stat().st_mtime) for name in dev.git("ls-files").split()}


def test_an_edit_acts_at_once_and_goes_back_as_a_patch(dev: Tree) -> None:
    look = ("python", "-c", "import demo.mod; print(demo.mod.line_20, demo.mod.__file__)")
    value, _, where = loop(dev, *look).partition(" ")
    assert value == "2"
    assert where == f"{dev.path.parent}/.links/environment/demo/mod.py"
    changed = PATCHED.replace(b"line_20 = 2", b"line_20 = 77")
    (dev.path / "demo" / "mod.py").write_bytes(changed)
    (dev.path / "demo" / "new.py").write_bytes(b"y = 5\n")
    assert loop(dev, *look).startswith("77 ")
    assert loop(dev, "python", "-c", "import demo.new; print(demo.new.y)") == "5"
    # from the work tree, where the packages lie without what is compiled
    inside = f"cd '{dev.path}' && python -c 'import demo; print(demo.__file__)'"
    assert "/.links/" in loop(dev, "sh", "-c", inside)
    dev.amend({"demo/mod.py": changed})
    assert dev.export()["changed"] == [PATCH]
    assert dev.git("status", "--porcelain", "--ignored") == ""  # no byte code, nothing


def test_a_work_tree_stays_where_the_series_changed(dev: Tree, tree: Tree) -> None:
    (dev.path / "demo" / "mod.py").write_bytes(b"line_20 = 'mine'\n")
    tree.commit({"demo/more.py": b"z = 1\n"}, "Add more")
    tree.export()
    out, _ = told(dev, "python", "-c", "import demo.mod; print(demo.mod.line_20)")
    assert "the work tree was not updated" in out
    assert out.splitlines()[-1] == "mine"


def test_what_the_command_gets_and_what_an_editor_is_told(dev: Tree, tmp_path: Path) -> None:
    loop(dev, "sh", "-c", "echo; exit 7", code=7)
    assert loop(dev, "printf", "%s|", "a b", "--target", "--", "c") == "a b|--target|--|c|"
    assert "not installed on this machine" in told(dev, "no-such-program", code=8)[1]
    found = json.loads(told(dev, "false", words=("--json",))[0])
    assert found["trees"] == {"demo": str(dev.path)}
    assert found["variables"]["PYTHONPATH"] == f"{dev.path.parent}/.links/environment"
    assert set(dates(dev).values()) == {OLD}  # nothing was touched
    (dev.path / "demo" / "mod.py").unlink()  # and the wheel's does not come instead
    look = "from importlib.util import find_spec; print(find_spec('demo.mod'))"
    assert loop(dev, "python", "-c", look) == "None"
    (dev.path / ".git").rename(tmp_path / "away")
    assert "not a work tree of a series" in told(dev, "true", code=2)[1]


def test_the_plugin_is_the_checkout_s(tree: Tree, tmp_path: Path) -> None:
    """Found as an installed one is, with its machine code; an edit acts at once."""
    with_kernels(tree.project, toolchain(tmp_path / "toolchain"), b"kernel first 80 1024 0 0\n")
    made = Tree(tree.project, tmp_path / "trees" / "demo", tree.told)
    code = """
import importlib.metadata as metadata, pathlib
(found,) = metadata.entry_points(group="some.plugins")
register = found.load()
folder = pathlib.Path(__import__("demo_own").__file__).parent
print(register(), metadata.version("demo-own"), (folder / "decode/cubins/sm_90a.cubin").exists())
"""
    assert loop(made, "python", "-c", code) == "None 1.5 True"
    edited = tree.project.root / "own" / "demo_own" / "__init__.py"
    edited.write_text("def register(): return 'edited'\n")
    assert loop(made, "python", "-c", code) == "edited 1.5 True"
    assert not list(edited.parent.rglob("__pycache__"))
