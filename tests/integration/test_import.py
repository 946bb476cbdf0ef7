"""Patches from outside."""

import json
from pathlib import Path

import pytest

from tests.integration.worktrees import Tree, snapshot
from tests.project import PATCH
from tests.support import BODY

SIGNED = """\
Signed-off-by: Bob <bob@example.invalid>
Signed-off-by: Cy <cy@example.invalid>
Co-authored-by: Di <di@example.invalid>
Co-authored-by: Ed <ed@example.invalid>"""


@pytest.fixture
def outside(tree: Tree, tmp_path: Path) -> Path:
    """Two commits of somebody else on the release, as `git format-patch` mails them."""
    repo = tree.project.repo
    repo("checkout", "--quiet", "--detach", "v1.0")
    why, _, ours = BODY.partition("\n\n")
    body = f"{why}\n\n{SIGNED}\n\n{ours}"
    repo.commit({"demo/__init__.py": b"x = 2\n"}, f"Set x to two\n\n{body}")
    # the series' patch changes line 20, which is among the context
    changed = (repo.path / "demo/mod.py").read_bytes()
    changed = changed.replace(b"line_22 = 1\n", b"line_22 = 1\nz = 1\n")
    repo.commit({"demo/mod.py": changed}, f"[Core] Add more\n\n{BODY}")
    path = tmp_path / "from outside.mbox"
    path.write_text(repo("format-patch", "--stdout", "v1.0..HEAD") + "\n")
    return path


def test_mails_become_patches_of_the_series(tree: Tree, outside: Path) -> None:
    out, _ = tree.run("patches", "import", "demo", str(outside), "--json")
    names = ["set-x-to-two.patch", "core-add-more.patch"]
    assert json.loads(out)["added"] == names
    assert (tree.project.patches / "series").read_text().split() == [PATCH, *names]
    text = (tree.project.patches / names[0]).read_text(encoding="utf-8")
    assert "From: Ada <ada@example.invalid>" in text
    # who signed stands in the message, but is none of our trailers
    assert f"{SIGNED}\n\nUpstream-Status: Pending" in text
    assert "+z = 1" in (tree.project.patches / names[1]).read_text(encoding="utf-8")
    tree.run("patches", "check")
    tree.commit({"demo/mine.py": b"x\n"}, "Add a module of mine")
    tree.refused("changed since")  # a work tree of before cannot undo it


def test_what_is_missing_is_told_and_nothing_written(tree: Tree, outside: Path) -> None:
    mails = outside.read_text()
    before = snapshot(tree.project.root)
    for old, new, fragment in (
        ("Risk: build\n", "", "trailer Risk: missing"),
        ("tests/test_it.py::", "tests/no.py::", "tests/no.py does not exist"),
        ("-x = 1", "-x = 7", "does not apply"),
    ):
        outside.write_text(mails.replace(old, new, 1))
        _, err = tree.run("patches", "import", "demo", str(outside), code=6)
        assert fragment in err
        assert snapshot(tree.project.root) == before


def test_files_that_are_no_patches(tree: Tree, tmp_path: Path) -> None:
    file = tmp_path / "file"
    before = snapshot(tree.project.root)
    for data in (b"", b"From x\n\n", b"diff --git a/x b/x\n"):
        file.write_bytes(data)
        tree.run("patches", "import", "demo", str(file), code=6)
    for path in (tmp_path / "none", tmp_path):
        tree.run("patches", "import", "demo", str(path), code=2)
    assert snapshot(tree.project.root) == before
