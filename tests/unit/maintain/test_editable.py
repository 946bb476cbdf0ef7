"""The folder of links that makes work trees importable."""

from pathlib import Path, PurePosixPath

from sparkforge.maintain import dev
from sparkforge.maintain.dev import TreeOf
from sparkforge.pins.types import PathRule

SITE = PurePosixPath("/site")
RULES = (
    PathRule(repo="demo/", wheel="demo/"),
    PathRule(repo="csrc/", wheel="demo/data/csrc/"),
    PathRule(repo="tests/", wheel=None),
)
FILES = (
    "demo/__init__.py",
    "demo/sub/a.py",
    "demo/sub/b.py",
    "demo/mixed/c.py",
    "csrc/k.cu",
    "tests/test_x.py",
    "setup.py",
)
MEMBERS = (
    "demo/__init__.py",
    "demo/sub/a.py",
    "demo/sub/b.py",
    "demo/mixed/c.py",
    "demo/mixed/n.so",
    "demo/data/csrc/k.cu",
    "demo/data/made.txt",
    "demo.libs/libx.so",
    "demo-1.0.dist-info/RECORD",
    "demo/third/t.py",
)


def tree(files: tuple[str, ...] = FILES) -> TreeOf:
    return TreeOf(PurePosixPath("/trees"), RULES, set(FILES), files)


def test_each_file_comes_from_its_place() -> None:
    assert dev.links_of(MEMBERS, [tree()], SITE) == {
        "demo/__init__.py": "/trees/demo/__init__.py",
        "demo/sub/a.py": "/trees/demo/sub/a.py",
        "demo/sub/b.py": "/trees/demo/sub/b.py",
        "demo/mixed/c.py": "/trees/demo/mixed/c.py",
        "demo/mixed/n.so": "/site/demo/mixed/n.so",
        "demo/data/csrc/k.cu": "/trees/csrc/k.cu",
        "demo/data/made.txt": "/site/demo/data/made.txt",
        "demo/third/t.py": "/site/demo/third/t.py",
        "demo.libs/libx.so": "/site/demo.libs/libx.so",
    }


def test_work_trees_stand_before_the_wheel() -> None:
    """Also where they lack a file; the longest prefix of all trees owns a path."""
    now = (*FILES, "demo/new.py", "demo/third/t.py")
    left = tuple(name for name in now if name != "demo/mixed/c.py")
    links = dev.links_of(MEMBERS, [tree(left)], SITE)
    assert "demo/mixed/c.py" not in links
    assert links["demo/new.py"] == "/trees/demo/new.py"
    assert links["demo/third/t.py"] == "/trees/demo/third/t.py"
    inner = TreeOf(
        PurePosixPath("/inner"),
        [PathRule(repo="pkg/t/", wheel="demo/third/")],
        {"pkg/t/t.py"},
        ["pkg/t/t.py"],
    )
    links = dev.links_of(MEMBERS, [tree(), inner], SITE)
    assert links["demo/third/t.py"] == "/inner/pkg/t/t.py"


def test_links_are_made_anew(tmp_path: Path) -> None:
    folder, precious = tmp_path / "links", tmp_path / "tree" / "precious.py"
    precious.parent.mkdir()
    precious.write_text("x\n")
    dev.write(folder, {"a": "/x/a", "d/b": "/x/b", "pkg": str(precious.parent)})
    wanted = {"a": "/x/a", "d": "/x/d", "pkg/precious.py": "/x"}
    dev.write(folder, wanted)
    links = (path for path in folder.rglob("*") if path.is_symlink())
    assert {str(path.relative_to(folder)): str(path.readlink()) for path in links} == wanted
    assert precious.read_text() == "x\n"
