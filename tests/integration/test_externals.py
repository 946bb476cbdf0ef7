"""What an upstream's build would fetch: by full SHA, with submodules, over the file transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build.compile import externals
from sparkforge.build.executor import Build
from sparkforge.build.graph import Graph
from sparkforge.build.item import Results, StepResult
from sparkforge.build.results import EnvironmentResult, SourceResult, WheelhouseResult
from sparkforge.cli.build import mention_fallback
from sparkforge.core.errors import FetchError, IntegrityError
from sparkforge.core.index import Index
from sparkforge.pins.pins import External, Provider
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store
from tests.results import item, step
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

    def pin(self, commit: str | None = None) -> External:
        return External.model_construct(  # a path in place of an address
            git=str(self.outer.path), commit=commit or self.commit, redirect="CUTLASS_DIR"
        )

    def ensure(self, pin: External | None = None) -> externals.Fetched:
        return externals.ensure(self.store, "demo/outer", pin or self.pin(), self.access)


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    yield Sources(tmp_path)


def test_the_tree_is_there_with_what_its_submodules_hold(sources: Sources, tmp_path: Path) -> None:
    fetched = sources.ensure()
    assert fetched.named() == {
        "cutlass": sources.inner_commit,
        "cutlass/third-party/deepest": sources.deep_commit,
    }
    fetched.unpack(tmp_path / "there")
    assert (tmp_path / "there" / "CMakeLists.txt").read_bytes() == b"project(x)\n"
    assert (tmp_path / "there" / "cutlass" / "inner.h").exists()
    deep = tmp_path / "there" / "cutlass" / "third-party" / "deepest" / "deep.h"
    assert deep.read_bytes() == b"// deep\n"


def test_what_the_store_holds_is_not_asked_for_again(sources: Sources) -> None:
    sources.ensure()
    sources.outer.path.rename(sources.outer.path.with_name("gone"))
    sources.access = replace(sources.access, offline=True)
    assert sources.ensure().commit == sources.commit


def test_a_commit_that_is_nowhere_is_an_error_with_the_place(sources: Sources) -> None:
    with pytest.raises(FetchError, match="demo/outer: git could not fetch 000000000000") as error:
        sources.ensure(sources.pin("0" * 39 + "1"))
    assert "--mirror demo/outer=" in error.value.remedy


def test_offline_names_the_commit(sources: Sources) -> None:
    sources.access = replace(sources.access, offline=True)
    pin = External(git="https://127.0.0.1:9/x.git", commit=sources.commit, redirect="X")
    with pytest.raises(FetchError, match="--offline is set"):
        sources.ensure(pin)


def test_a_mirror_takes_the_place_of_the_address(sources: Sources) -> None:
    pin = External(git="https://127.0.0.1:9/x.git", commit=sources.commit, redirect="X")
    sources.access = replace(sources.access, mirrors={"demo/outer": str(sources.outer.path)})
    assert sources.ensure(pin).commit == sources.commit


def test_a_submodule_without_an_address_is_refused(sources: Sources) -> None:
    sources.outer.write({".gitmodules": b""})
    commit = sources.outer.commit({".gitmodules": b'[submodule "x"]\n\tpath = other\n'})
    # a commit as git writes it: the entry itself stays in the tree
    with pytest.raises(IntegrityError, match="has the submodule cutlass, but no address for it"):
        sources.ensure(sources.pin(commit))


def test_a_second_build_speaks_of_sources_that_fell_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def source(provider: Provider, *, made_now: bool = False) -> StepResult[SourceResult]:
        result = SourceResult(provider, "a" * 40, "b" * 40, "here")
        return step(item(result, "sources", provider="git"), result, made_now=made_now)

    steps = {
        "demo": source("git"),
        "other": source("release"),
        "third": source("release"),
        "now": source("release", made_now=True),  # the step itself has said so
    }
    sources = {name: one.item for name, one in steps.items()}
    wheelhouse = item(WheelhouseResult(0), "wheelhouse")
    graph = Graph(
        sources, {}, None, None, {}, {}, None, wheelhouse, item(EnvironmentResult()), None
    )
    mention_fallback(Build(graph, Results(steps.values())))
    (said,) = capsys.readouterr().out.splitlines()
    assert "sources of other, third: release files" in said
