"""Objects of a repository, read through one process that GitPython talks to."""

import os
import subprocess
from pathlib import Path

import pytest

from sparkforge.core import git
from sparkforge.core.errors import CommandError, StoreError
from tests.support import Repo

FILES = {
    "a.py": b"a = 1\n",
    "dir/b.py": b"b = 1\n",
    "dir/sub/\xff".encode("latin-1").decode(errors="surrogateescape"): b"\0\n",
}


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    made = Repo(tmp_path / "repo")
    made.commit(dict(FILES), "First\n\nWhy.")
    return made


def test_it_reads_what_git_reads(repo: Repo) -> None:
    repo.commit({"dir/run.sh": b"#!/bin/sh\n"}, "Second")
    files = {one.path: one for one in git.changes(repo.path, git.EMPTY_TREE, "HEAD")}
    with git.reading(repo.path) as blob:
        assert {path: blob(files[path].new_blob) for path in FILES} == FILES
        with pytest.raises(CommandError, match="no-such"):
            blob("no-such")
        assert blob("HEAD:a.py") == b"a = 1\n"  # and it goes on


def test_damage_is_an_error(tmp_path: Path, repo: Repo) -> None:
    bare = tmp_path / "store.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", repo.path, bare], check=True)
    blob = repo("rev-parse", "HEAD:a.py")
    for path in filter(Path.is_file, (bare / "objects").rglob("*")):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with git.reading(bare) as read, pytest.raises(CommandError, match=f"delete {bare}"):
        read(blob)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_repository_is_read_where_git_trusts_it(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (repo.path, *repo.path.rglob("*")):
        os.chown(path, 12345, 12345)
    with pytest.raises(StoreError):
        git.git(repo.path, "log")
    with pytest.raises(StoreError), git.reading(repo.path):
        pass
    settings = tmp_path / "gitconfig"
    settings.write_text('[safe]\n\tdirectory = "*"\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    git.trusted_folders.cache_clear()
    with git.reading(repo.path) as blob:
        assert blob("HEAD:a.py") == FILES["a.py"]
    git.trusted_folders.cache_clear()


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
