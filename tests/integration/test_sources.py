"""Pin → commit, from throw-away git repositories and from release files."""

import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.core import git, index
from sparkforge.core.errors import FetchError, IntegrityError
from sparkforge.core.index import Index
from sparkforge.pins.pins import SourcePlan, Upstream
from sparkforge.sources import sources
from sparkforge.sources.sources import Access, Source
from sparkforge.store.store import Store
from tests.support import Repo, make_sdist, make_tar, make_wheel, sha256, tar_member

FILES = {"demo/__init__.py": b"x = 1\n", "README": b"words\n"}


PATHS = ({"repo": "src/demo/", "wheel": "demo/"}, {"repo": "plugins/", "wheel": "demo/plugins/"})


def upstream(commit: str, *, tag: str = "v1.0", file: Path | None = None) -> Upstream:
    files = {}
    if file is not None:
        data = file.read_bytes()
        pin = {"project": "demo", "file": file.name, "sha256": sha256(data), "size": len(data)}
        files["it"] = pin
    return Upstream.model_validate(
        {
            "git": "https://127.0.0.1:9/demo.git",
            "tag": tag,
            "commit": commit,
            "version": "1.0",
            "files": files,
            "source_file": "it" if file else None,
            "paths": PATHS,
        }
    )


@dataclass
class World:
    store: Store
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def tagged(self) -> tuple[Repo, str]:
        """Make a repository with the tag; return it, and the commit."""
        repo = Repo(self.folder / "demo")
        commit = repo.commit(dict(FILES))
        repo("tag", "v1.0")
        return repo, commit

    def ensure(
        self,
        pinned: Upstream,
        plan: SourcePlan = "git",
        mirror: str | Path = "",
        *,
        offline: bool = False,
    ) -> Source:
        mirrors = {"demo": str(mirror)} if mirror else {}
        return sources.ensure(self.store, "demo", pinned, plan, Access(Index(), mirrors, offline))

    def links(self) -> Path:
        """Give pip a folder as its only source of files."""
        folder = self.folder / "links"
        folder.mkdir(exist_ok=True)
        self.monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        self.monkeypatch.setenv("PIP_NO_INDEX", "1")
        index.pip_settings.cache_clear()
        return folder

    def release(self, file: Path, store: Store | None = None) -> Source:
        """Import a release file that has been downloaded already."""
        store = store or self.store
        store._prepare()
        partial = store.partial_path(sha256(file.read_bytes()))
        shutil.copyfile(file, partial)
        store.accept_download(partial, partial.name, file.name)
        pin = upstream("a" * 40, file=file)
        return sources.ensure(store, "demo", pin, "release", Access(Index(), {}, offline=True))


@pytest.fixture
def world(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(store, tmp_path, monkeypatch)


def listing(source: Source) -> dict[str, str]:
    """Return mode by path."""
    raw = git.git(source.repo, "ls-tree", "-r", "-z", source.commit)
    entries = (entry.split("\t", 1) for entry in filter(None, raw.split("\0")))
    return {path: meta.split()[0] for meta, path in entries}


# -- git ---------------------------------------------------------------------------


@pytest.mark.parametrize("annotated", [False, True])
def test_tagged_commit_is_fetched_alone(world: World, annotated: bool) -> None:
    repo = Repo(world.folder / "demo")
    repo.commit({"old": b"history\n"})
    commit = repo.commit(dict(FILES))
    repo("tag", *(["-a", "-m", "a tag"] if annotated else []), "v1.0")
    source = world.ensure(upstream(commit), mirror=repo.path)
    assert (source.commit, source.provider) == (commit, "git")
    assert source.tree == repo("rev-parse", "HEAD^{tree}")
    assert git.git(source.repo, "rev-list", "--count", commit) == "1"


def test_moved_or_missing_tag_is_refused(world: World) -> None:
    repo, pinned = world.tagged()
    moved = repo.commit({"more": b"more\n"})
    repo("tag", "--force", "v1.0")
    with pytest.raises(IntegrityError, match=f"tag v1.0 is {moved}, but {pinned} is pinned") as e:
        world.ensure(upstream(pinned), mirror=repo.path)
    assert e.value.exit_code == 5
    repo("tag", "v1.0.1")
    repo("tag", "--delete", "v1.0")
    with pytest.raises(IntegrityError, match=r"tag v1\.0 is not in "):
        world.ensure(upstream(pinned), mirror=repo.path)


def test_mirror_is_never_an_option_of_git(world: World) -> None:
    mark = world.folder / "mark"
    with pytest.raises(FetchError):
        world.ensure(upstream("a" * 40), mirror=f"--upload-pack=touch {mark};")
    assert not mark.exists()


def test_mirror_path_works_offline_and_before_a_release_file(world: World) -> None:
    repo, commit = world.tagged()
    with pytest.raises(FetchError, match="--offline is set"):
        world.ensure(upstream(commit), mirror=repo.path.as_uri(), offline=True)
    file = make_sdist(world.links(), "demo", "1.0", FILES)
    pinned = upstream(commit, file=file)
    source = world.ensure(pinned, "release", mirror=repo.path, offline=True)
    assert (source.commit, source.provider) == (commit, "git")


def test_fallback_needs_permission_and_warns(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_sdist(world.links(), "demo", "1.0", FILES)
    pinned = upstream("a" * 40, file=file)
    with pytest.raises(FetchError, match="could not fetch"):
        world.ensure(pinned, "git")
    assert "instead of git" not in capsys.readouterr().out
    assert world.ensure(pinned, "auto").provider == "release"
    assert "using the release file instead of git" in capsys.readouterr().out


@pytest.mark.parametrize("left", ["shallow.lock", "refs/pins/v1.0/x.lock"])
def test_locks_of_killed_git_are_removed(world: World, left: str) -> None:
    repo, commit = world.tagged()
    bare = world.store.git_path("demo")
    with world.store.lock("git-demo"):
        git.init_bare(bare)
    pack = bare / "objects" / "pack" / "tmp_pack_x"
    for path in (bare / left, pack):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    assert world.ensure(upstream(commit), mirror=repo.path).commit == commit
    assert not pack.exists()
    assert not (bare / left).exists()


# -- release files -------------------------------------------------------------------


def test_sdist_import_is_reproducible(world: World) -> None:
    file = make_sdist(world.folder, "demo", "1.0", FILES)
    first = world.release(file)
    assert world.release(file) == first
    other = world.release(file, Store(world.folder / "other"))
    assert (other.commit, other.tree) == (first.commit, first.tree)
    # the very SHA: a change of how archives become commits would break every recorded series
    assert first.tree == "9347069b027a98cd71b5400dc411e2c14232f1e9"
    assert first.commit == "716a5072e2e41e2ea09e2d41fb41e1d759222a2a"
    assert listing(first) == {"README": "100644", "demo/__init__.py": "100644"}


def test_wheel_import_maps_paths(world: World) -> None:
    files = {
        "demo/run.py": b"#!/bin/sh\n",
        "demo/plugins/a/b.py": b"x = 1\n",
        "demo/core.so": b"\0",
        "other/x.py": b"",
    }
    file = make_wheel(world.folder, files=files, executable=["demo/run.py"])
    first = world.release(file)
    other = world.release(file, Store(world.folder / "other"))
    assert (other.commit, other.tree) == (first.commit, first.tree)
    assert listing(first) == {"plugins/a/b.py": "100644", "src/demo/run.py": "100755"}


def test_import_keeps_modes_links_and_names(world: World) -> None:
    names = ["with space", 'quo"te', "back\\slash", "new\nline", "tab\t", "\u00fcn\u00ef", "-dash"]
    names += ["a b/a b", "\udcff\udcfe", "#hash", "$(x)", "trailing "]
    members = [tar_member(f"demo-1.0/d/{name}", name.encode(errors="replace")) for name in names]
    members += [
        tar_member("demo-1.0/run", b"#!/bin/sh\n", mode=0o755),
        tar_member("demo-1.0/group", b"x", mode=0o674),
        tar_member("demo-1.0/link", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        tar_member("demo-1.0/hard", kind=tarfile.LNKTYPE, link="demo-1.0/run", mode=0o755),
        tar_member("demo-1.0/empty", b""),
        tar_member("demo-1.0/folder", kind=tarfile.DIRTYPE, mode=0o755),
    ]
    source = world.release(make_tar(world.folder / "demo-1.0.tar.gz", members))
    modes = listing(source)
    assert modes == {f"d/{name}": "100644" for name in names} | {
        "run": "100755",
        "group": "100644",
        "link": "120000",
        "hard": "100755",
        "empty": "100644",
    }
    blobs = git.blobs_at(source.repo, source.commit, modes)
    assert git.isolated(source.repo, "cat-file", "blob", blobs["link"]).stdout == b"/etc/passwd"
    assert git.isolated(source.repo, "cat-file", "blob", blobs["hard"]).stdout == b"#!/bin/sh\n"


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("demo-1.0/../../evil", tarfile.REGTYPE, "is outside the tree"),
        ("/demo-1.0/evil", tarfile.REGTYPE, "is outside the tree"),
        ("demo-1.0/.git/config", tarfile.REGTYPE, "is outside the tree"),
        ("other-1.0/file", tarfile.REGTYPE, "single top folder"),
        ("demo-1.0/dev", tarfile.FIFOTYPE, "neither file nor link"),
    ],
)
def test_sdist_with_other_than_files_of_one_tree_is_refused(
    world: World, name: str, kind: bytes, problem: str
) -> None:
    data = b"evil" if kind == tarfile.REGTYPE else b""
    members = [tar_member("demo-1.0/good", b"good"), tar_member(name, data, kind=kind)]
    with pytest.raises(IntegrityError, match=problem) as caught:
        world.release(make_tar(world.folder / "demo-1.0.tar.gz", members))
    assert caught.value.exit_code == 5
    assert git.git(world.store.git_path("demo"), "for-each-ref") == ""


def test_wheel_member_outside_the_tree_is_refused(world: World) -> None:
    file = make_wheel(world.folder, files={"../evil": b"x"})
    with pytest.raises(IntegrityError, match="is outside the tree"):
        world.release(file)


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    elif how == "encrypted":
        data[data.index(b"PK\1\2") + 8] |= 1
    else:
        data[:] = b"<html>no archive</html>" * 20
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("sdist", "cut"), ("sdist", "html"), ("wheel", "cut"), ("wheel", "encrypted")],
)
def test_damaged_archive_is_refused(world: World, kind: str, how: str) -> None:
    files: Mapping[str, bytes] = {**FILES, "demo/data.py": os.urandom(50_000)}
    make = make_sdist if kind == "sdist" else make_wheel
    file = make(world.folder, "demo", "1.0", files)
    whole = file.read_bytes()
    damage(file, how)
    with pytest.raises(IntegrityError, match="not a readable archive"):
        world.release(file)
    file.write_bytes(whole)
    assert world.release(file).commit
