"""Files of a commit, unpacked."""

from __future__ import annotations

import os
from pathlib import Path

from sparkforge.core import git
from tests.support import Repo


def test_modes_and_links_are_as_in_the_commit_whatever_the_umask(tmp_path: Path) -> None:
    repo = Repo(tmp_path / "repo")
    (repo.path / "run.sh").write_text("#!/bin/sh\n")
    (repo.path / "run.sh").chmod(0o755)
    (repo.path / "link").symlink_to("src/a.py")
    repo.commit({"src/a.py": b"a = 1\n", "docs/b.md": b"b\n"}, "First")
    before = os.umask(0o077)
    try:
        git.unpack(repo.path, "HEAD", ["src", "run.sh", "link"], tmp_path / "new" / "tree")
    finally:
        os.umask(before)
    tree = tmp_path / "new" / "tree"
    assert {path.name for path in tree.iterdir()} == {"src", "run.sh", "link"}
    assert (tree / "link").read_bytes() == b"a = 1\n"
    modes = [path.stat().st_mode & 0o777 for path in (tree / "src" / "a.py", tree / "run.sh")]
    assert modes == [0o644, 0o755]
