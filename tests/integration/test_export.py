"""Work trees ↔ series: what a developer does with plain git comes back as canonical patches."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.cli import main
from tests.integration.worktrees import Tree, snapshot
from tests.project import PATCH, PATCHED, Project
from tests.support import BODY

NEW = "add-a-module.patch"


def series_of(project: Project) -> list[str]:
    return (project.patches / "series").read_text().split()


# -- what comes back ------------------------------------------------------------------


def test_a_new_commit_becomes_a_patch_and_the_record_follows(tree: Tree) -> None:
    tree.commit({"demo/new.py": b"y = 1\n"}, "Add a module")
    tree.refused("add-a-module.patch", "--check", code=3)
    assert tree.export()["added"] == [NEW]
    assert series_of(tree.project) == [PATCH, NEW]
    tree.run("patches", "check")
    assert tree.git("rev-parse", "HEAD^{tree}") in (tree.project.root / "pins.yaml").read_text()
    tree.export("--check")


def test_other_words_or_lines_change_a_patch(tree: Tree) -> None:
    tree.amend({}, "-m", f"Change a line of the module\n\nAnother reason. {BODY}")
    assert tree.export()["changed"] == [PATCH]
    tree.amend({"demo/mod.py": PATCHED.replace(b"line_20 = 2", b"line_20 = 3")})
    report = tree.export()
    assert (report["changed"], report["added"], report["dropped"]) == ([PATCH], [], [])
    assert b"+line_20 = 3" in (tree.project.patches / PATCH).read_bytes()


def test_order_is_that_of_the_commits_and_a_patch_goes_only_by_its_name(tree: Tree) -> None:
    tree.commit({"demo/new.py": b"y = 1\n"}, "Add a module")
    tree.export()
    first, second = tree.git("rev-list", "--reverse", "HEAD~2..HEAD").split()
    tree.git("reset", "--quiet", "--hard", "HEAD~2")
    tree.git("cherry-pick", second, first)
    report = tree.export()
    assert report["changed"] == report["added"] == report["dropped"] == []
    assert series_of(tree.project) == [NEW, PATCH]
    tree.git("-c", "sequence.editor=sed -i '2s/pick/fixup/'", "rebase", "-i", "HEAD~2")
    tree.refused(f"--drop {PATCH}")
    tree.refused("no such patch", "--drop", "no-such", code=2)
    report = tree.export("--drop", PATCH)
    assert (report["dropped"], report["changed"]) == ([PATCH], [NEW])
    assert series_of(tree.project) == [NEW]


def test_the_last_patch_can_go_with_its_record(tree: Tree) -> None:
    tree.git("reset", "--quiet", "--hard", "HEAD~1")
    tree.export("--drop", PATCH.removesuffix(".patch"))
    assert list(tree.project.patches.iterdir()) == []
    assert "patched:" not in (tree.project.root / "pins.yaml").read_text()
    tree.run("patches", "check")
    tree.commit({"demo/new.py": b"y = 1\n"}, "Add a module")
    assert tree.export()["added"] == [NEW]


@pytest.mark.parametrize(
    "files",
    [
        {
            "demo/crlf.py": b"a = 1\r\nb = 2\r\n",
            "demo/copy.py": PATCHED,
            "demo/no_end.py": b"x = 1",
        },
        {"demo/mod.py": None, "demo/moved.py": PATCHED},
    ],
)
def test_every_kind_of_change_comes_back(tree: Tree, files: Mapping[str, bytes | None]) -> None:
    tree.commit(files, "Add a module")
    tree.export()
    tree.run("patches", "check")
    again = replace(tree, path=tree.path.parent / 'a:b"c\\d')
    tree.run("patches", "apply", "demo", str(again.path))
    assert again.git("rev-parse", "HEAD^{tree}") == tree.git("rev-parse", "HEAD^{tree}")
    again.commit({"demo/new.py": b"y = 1\n"}, "Add another module")
    assert again.export()["added"] == ["add-another-module.patch"]


# -- what is refused -----------------------------------------------------------------


def test_changes_that_are_not_committed(tree: Tree) -> None:
    (tree.path / "demo" / "mod.py").write_bytes(b"x\n")
    tree.refused("uncommitted changes: demo/mod.py")
    tree.git("add", "--all")
    tree.refused("uncommitted changes: demo/mod.py")


def test_commits_that_cannot_be_a_series(tree: Tree) -> None:
    tree.git("-c", "sequence.editor=sed -i 1s/pick/edit/", "rebase", "-i", "HEAD~1")
    tree.refused("a rebase or merge is in progress")
    tree.git("rebase", "--abort")
    tree.commit({}, "Change nothing at all")
    tree.refused("not a mail-format patch")
    tree.git("reset", "--quiet", "--hard", "HEAD~1")
    tree.commit({"demo/latin.py": b"caf\xe9\n"}, "Add a module")
    tree.refused("UTF-8")
    tree.amend({"demo/latin.py": b"x\n", os.fsdecode(b"demo/caf\xe9.py"): b"x = 1\n"})
    tree.refused("not a plain path")
    tree.git("reset", "--quiet", "--hard", "HEAD~1")
    tree.commit({"demo/latin.py": b"x\n"}, "Add a module")
    tree.commit({"demo/newer.py": b"y = 1\n"}, "Add a module")
    tree.refused(f"{NEW} is listed twice")
    tree.git("reset", "--quiet", "--hard", "HEAD~1")
    tree.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    tree.commit({"demo/new.py": b"y = 1\n"}, "Add another module")
    tree.git("merge", "--quiet", "--no-edit", "sparkforge")
    tree.refused("line of commits without merges")
    tree.git("checkout", "--quiet", "--orphan", "elsewhere")
    tree.git("commit", "--quiet", "-m", "Root")
    tree.refused("line of commits without merges")


def test_messages_that_do_not_survive_the_mail_format(tree: Tree) -> None:
    for line in ("---", "diff --git a/x b/x", "Index: x", "From: somebody <x@example.invalid>"):
        tree.commit({"demo/new.py": b"y = 1\n"}, "Add a module", f"{line}\n\n{BODY}")
        tree.refused()
        tree.git("reset", "--quiet", "--hard", "HEAD~1")


def test_odd_subjects_come_back_or_are_refused(tree: Tree) -> None:
    codes = []
    for subject in (
        "[PATCH] Add a module",
        "Add\ta module",
        "\u00fc",
        "x" * 73,
        "x" * 72,
        "Add a \u00fcber module" + " and more" * 6,  # git folds it
        "Add \x1b[31m red",
    ):
        tree.commit({"demo/new.py": b"y = 1\n"}, subject)
        before = snapshot(tree.project.root)
        codes.append(main.main(tree.project.command("patches", "export", str(tree.path))[3:]))
        tree.git("reset", "--quiet", "--hard", "HEAD~1")
        if codes[-1] == 0:
            tree.run("patches", "check")
            added = set(series_of(tree.project)) - {PATCH}
            tree.export(*(f"--drop={name}" for name in added))
        else:
            assert snapshot(tree.project.root) == before, subject
    assert codes == [6, 6, 6, 6, 0, 0, 0]


def test_a_folder_that_is_no_work_tree(tree: Tree, tmp_path: Path) -> None:
    for folder in (tmp_path / "no such", tmp_path, tree.project.repo.path):
        _, err = tree.run("patches", "export", str(folder), code=2)
        assert "patches apply" in err
