"""Patches from outside and new ones, in our form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worktrees import Tree, snapshot
from tests.project import PATCH
from tests.support import BODY

GIVEN = (
    *("--upstream-status", "Backport https://127.0.0.1/pull/7"),
    *("--drop-when", "demo>=2.0; the pin has it", "--risk", "build"),
    *("--test", "tests/test_it.py::test_it"),
)
WHY = "The release lacks this, as a test of ours shows; it costs nothing and was checked by hand."

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
    repo.commit(
        {"demo/__init__.py": b"x = 2\n"},
        "Set x to two\n\nFixes 7.\n\nSigned-off-by: Bob <bob@example.invalid>",
    )
    repo.commit({"demo/more.py": b"z = 1\n"}, f"[Core] Add more\n\n{WHY}")
    path = tmp_path / "from outside.mbox"
    path.write_text(repo("format-patch", "--stdout", "v1.0..HEAD") + "\n")
    return path


def imported(tree: Tree, *words: str | Path) -> Any:
    out, _ = tree.run("patches", "import", "demo", *map(str, words), "--json")
    return json.loads(out)


def patch_text(tree: Tree, name: str) -> str:
    return (tree.project.patches / name).read_text(encoding="utf-8")


def test_mails_become_patches_of_the_series(tree: Tree, outside: Path) -> None:
    mail = outside.read_text()
    outside.write_text(mail.replace("Signed-off-by: Bob <bob@example.invalid>", SIGNED))
    report = imported(tree, outside, *GIVEN, "--why", WHY)
    names = ["set-x-to-two.patch", "core-add-more.patch"]
    assert report["added"] == names
    assert (tree.project.patches / "series").read_text().split() == [PATCH, *names]
    text = patch_text(tree, names[0])
    assert "From: Ada <ada@example.invalid>" in text
    # who signed stands in the message, but is none of our trailers
    assert f"{SIGNED}\n\nUpstream-Status: Backport" in text
    assert text.index(WHY[:30]) < text.index("Fixes 7.")
    tree.run("patches", "check")
    tree.commit({"demo/mine.py": b"x\n"}, "Add a module of mine")
    tree.refused("changed since")  # a work tree of before cannot undo it


@pytest.mark.parametrize(
    ("words", "fragment", "code"),
    [
        (GIVEN, "body too short", 6),
        ((*GIVEN[:-2], "--why", WHY), "no trailer Test", 2),
        ((*GIVEN[:-1], "tests/no.py::test_it", "--why", WHY), "tests/no.py does not exist", 6),
        ((*GIVEN, "--why", WHY, "--subject", "One"), "--subject is for one patch", 2),
        ((), "does not apply", 6),
    ],
)
def test_what_is_missing_is_told_and_nothing_written(
    tree: Tree, outside: Path, words: tuple[str, ...], fragment: str, code: int
) -> None:
    if not words:
        outside.write_text(outside.read_text().replace("-x = 1", "-x = 7"))
    before = snapshot(tree.project.root)
    _, err = tree.run("patches", "import", "demo", str(outside), *words, code=code)
    assert fragment in err
    assert snapshot(tree.project.root) == before


def test_files_that_are_no_patches(tree: Tree, tmp_path: Path) -> None:
    file = tmp_path / "file"
    before = snapshot(tree.project.root)
    for data in (b"", b"From x\n\n", b"diff --git a/x b/x\n"):
        file.write_bytes(data)
        tree.run("patches", "import", "demo", str(file), *GIVEN, "--subject", "S", code=6)
    for path in (tmp_path / "none", tmp_path):
        tree.run("patches", "import", "demo", str(path), *GIVEN, code=2)
    assert snapshot(tree.project.root) == before


# -- new -----------------------------------------------------------------------------


def test_a_new_patch_is_refused_until_its_template_is_filled_in(tree: Tree) -> None:
    tree.write({"demo/new.py": b"y = 1\n"})
    tree.run("patches", "new", str(tree.path), "Add a module")
    message = tree.git("show", "-s", "--format=%B")
    assert message.startswith("Add a module\n\nFILL IN:")
    tree.refused("contains 'FILL IN:'")
    tree.refused("Risk: 'FILL IN:")
    tree.amend({}, "-m", f"Add a module\n\n{BODY}")
    assert tree.export()["added"] == ["add-a-module.patch"]


def test_a_user_without_a_name_can_commit(tree: Tree) -> None:
    assert tree.git("config", "user.email") == "sparkforge@localhost"
    Path.home().joinpath(".gitconfig").write_text("[user]\nname = Eve\nemail = e@example.invalid\n")
    again = tree.path.parent / "again"
    tree.run("patches", "apply", "demo", str(again))
    assert "user.email" not in (again / ".git" / "config").read_text()
