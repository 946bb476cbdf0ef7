"""External sources of a build: by full SHA, with submodules, over the file transport."""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build import cached
from sparkforge.build.results import FilesResult
from sparkforge.build.stages.natives import ARCHIVE, external_item
from sparkforge.core.errors import FetchError
from sparkforge.core.index import Index
from sparkforge.pins.pins import External
from sparkforge.sources.sources import Access
from sparkforge.store.store import Artefact, Store
from tests.results import context_of
from tests.support import Repo


class Sources:
    """A repository with a submodule that has a submodule, and a store."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root / "store")
        self.access = Access(Index(), {}, offline=False)
        self.deepest = Repo(root / "deepest")
        self.deep_commit = self.deepest.commit({"deep.h": b"// deep\n"})
        self.inner = Repo(root / "inner")
        self.add(self.inner, "third-party/deepest", "../deepest", self.deep_commit)
        self.inner_commit = self.inner.commit({"inner.h": b"// inner\n"})
        self.outer = Repo(root / "outer")
        self.add(self.outer, "cutlass", str(root / "inner"), self.inner_commit)
        self.commit = self.outer.commit({"CMakeLists.txt": b"project(x)\n"})

    @staticmethod
    def add(repo: Repo, path: str, url: str, commit: str) -> None:
        """Add a submodule as git would, without fetching it."""
        text = f'[submodule "any name"]\n\tpath = {path}\n\turl = {url}\n'
        repo.write({".gitmodules": text.encode()})
        repo("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
        repo("commit", "--quiet", "-m", "A submodule")
        (repo.path / path).mkdir(parents=True)

    def fetch(self, url: str = "", commit: str = "") -> Artefact[FilesResult]:
        """Make the item of this repository, as the external ``outer`` of vLLM."""
        pin = External.model_construct(  # a path in place of an address
            git=url or str(self.outer.path), commit=commit or self.commit, redirect="CUTLASS_DIR"
        )
        context = context_of("cpu", store=self.store, access=self.access)
        upstream = context.pins.upstream("vllm").model_copy(update={"externals": {"outer": pin}})
        pins = context.pins.model_copy(update={"upstreams": {"vllm": upstream}})
        item = external_item(replace(context, pins=pins), "vllm", "outer")
        cached.run(context, [item])
        return item.artefact


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


def test_archive_has_the_files_of_submodules(sources: Sources) -> None:
    made = sources.fetch()
    with tarfile.open(made.path / ARCHIVE) as archive:
        names = {name for name in archive.getnames() if not archive.getmember(name).isdir()}
        deep = archive.extractfile("./cutlass/third-party/deepest/deep.h")
        assert deep is not None and deep.read() == b"// deep\n"
    assert {"./CMakeLists.txt", "./cutlass/inner.h"} <= names
    assert not any(name.endswith("/.git") for name in names)


def test_mirror_is_read_once(sources: Sources) -> None:
    mirrors = {"vllm/outer": str(sources.outer.path)}
    sources.access = replace(sources.access, mirrors=mirrors, offline=True)
    first = sources.fetch("https://127.0.0.1:9/x.git")
    sources.outer.path.rename(sources.outer.path.with_name("gone"))
    assert sources.fetch().path == first.path


def test_what_cannot_be_fetched_is_one_error(sources: Sources) -> None:
    unaddressed = sources.outer.commit({".gitmodules": b'[submodule "x"]\n\tpath = other\n'})
    for commit in ("0" * 39 + "1", unaddressed):
        with pytest.raises(FetchError, match="vllm/outer"):
            sources.fetch(commit=commit)
    sources.access = replace(sources.access, offline=True)
    with pytest.raises(FetchError, match="--offline"):
        sources.fetch("https://127.0.0.1:9/x.git")
