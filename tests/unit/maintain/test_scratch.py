"""The throw-away copy of a checkout."""

from __future__ import annotations

from pathlib import Path

from sparkforge.maintain.companions import scratch
from tests.support import Repo, write_files


def test_a_copy_has_what_git_does_not_ignore(tmp_path: Path) -> None:
    repo = Repo(tmp_path / "checkout")
    repo.commit({".gitignore": b"dist/\n", "a/kept": b"1", "gone": b"2", "deleted": b"3"})
    write_files(repo.path, {"dist/built": b"4", "new": b"5", "deleted": None})
    copy = tmp_path / "copy"
    write_files(copy, {"of an earlier run": b"6"})
    root = repo.path
    scratch.make(root, copy, {root / "gone": None, root / "a/kept": b"7", root / "b/more": b"8"})
    found = {
        str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()
    }
    assert found == {".gitignore": b"dist/\n", "a/kept": b"7", "new": b"5", "b/more": b"8"}


def test_environments_are_lent_where_their_locks_are_the_same(tmp_path: Path) -> None:
    root, copy = tmp_path / "checkout", tmp_path / "copy"
    for folder, dev in ((root, b"x==1"), (copy, b"x==2")):
        write_files(folder, {"requirements/driver.txt": b"y==1", "requirements/dev.txt": dev})
    for name in (".venv", ".venv-dev"):
        (root / name).mkdir()
    scratch.lend_environments(root, copy)
    assert (copy / ".venv").resolve() == root / ".venv"
    assert not (copy / ".venv-dev").exists()
