"""Sources from git against release files: real histories, in the shapes that the pins have.

The files are made up; where they are in repository and wheel is what pins.yaml says of the real
ones (``paths``).
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import BuildError, SeriesError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.pins import Provider, Upstream
from sparkforge.pins.types import member_of
from sparkforge.series import series
from sparkforge.series.series import Patched, Series
from sparkforge.sources import sources
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store
from sparkforge.wheels import overlay
from tests.project import Project
from tests.support import BODY, EPOCH, ROOT, Repo, make_sdist, make_wheel, sha256

LINES = b"".join(b"line_%d = 1\n" % i for i in range(30))


# what repository and release have in common, and what each has alone
FILES = {"flashinfer/__init__.py": b"x = 1\n", "include/gemm.cuh": LINES}
FILES |= {"csrc/kernel.cu": b"// native\n", "README.md": b"words\n"}
TOUCHED = "include/gemm.cuh"
GENERATED = {"3rdparty/cutlass/a.h": b"// theirs\n", "PKG-INFO": b"1.0\n"}
SUBMODULE = "3rdparty/cutlass"
PATCHED = LINES.replace(b"line_20 = 1", b"line_20 = 2")
BUILD = ("build", "--target", "tiny", "--until", "wheels")


def reach(repo: Repo) -> None:
    """The user's mirror: the pinned address leads to a repository, over the file transport."""
    (Path(os.environ["HOME"]) / ".gitconfig").write_text(
        f'[url "{repo.path.as_uri()}"]\ninsteadOf = https://127.0.0.1:9/demo.git\n'
    )


class Bench:
    """A release like FlashInfer's with its wheel, the repository of its tag, and a series."""

    def __init__(self, folder: Path, store: Store, repository: bytes = LINES) -> None:
        """Make them.

        Args:
            repository: what the file that our patch changes is in the repository.
        """
        self.name, self.folder, self.store = "flashinfer", folder, store
        real = pins.load(ROOT / "pins.yaml").upstream(self.name)
        inside = {
            member: data
            for path, data in FILES.items()
            if (member := member_of(real.paths, path)) is not None
        }
        self.wheel = make_wheel(folder / "release", "demo", "1.0", inside)
        release = make_sdist(folder / "release", "demo", "1.0", {**FILES, **GENERATED})
        self.repo = Repo(folder / "upstream")
        self.repo.commit({"old.py": b"history\n"})
        self.repo.write(
            {
                **FILES,
                TOUCHED: repository,
                "old.py": None,
                "python/src/main.cc": b"// in no wheel\n",
            }
        )
        self.repo("add", "--all")
        link = f"160000,{'1' * 40},{SUBMODULE}"
        self.repo("update-index", "--add", "--cacheinfo", link)
        self.repo("commit", "--quiet", "-m", "Release")
        self.repo("tag", "-a", "-m", "a tag", real.tag)
        data = release.read_bytes()
        pinned = {
            "project": "demo",
            "file": release.name,
            "sha256": sha256(data),
            "size": len(data),
        }
        self.upstream = Upstream.model_validate(
            {
                "git": "https://127.0.0.1:9/demo.git",
                "tag": real.tag,
                "version": "1.0",
                "commit": self.repo("rev-parse", "HEAD"),
                "files": {"it": pinned},
                "source_file": "it",
                "paths": [rule.model_dump() for rule in real.paths],
            }
        )
        reach(self.repo)
        store._prepare()
        partial = store.partial_path(str(pinned["sha256"]))
        partial.write_bytes(data)
        store.accept_download(partial, partial.name, release.name)

    def series_on(self, before: bytes) -> Series:
        """Write a series of one patch, made on this content of the file."""
        work = Repo(self.folder / "author")
        work.commit({TOUCHED: before})
        work.commit({TOUCHED: PATCHED}, f"Change a line\n\n{BODY}")
        ((name, data),) = series.export(work.path, "HEAD~1", "HEAD")
        folder = self.folder / "patches" / self.name
        folder.mkdir(parents=True)
        (folder / name).write_bytes(data)
        (folder / "series").write_text(f"{name}\n")
        return series.read(folder)

    def patched(self, how: Provider, one: Series) -> Patched:
        access = Access(Index(), {}, offline=False)
        found = sources.ensure(self.store, self.name, self.upstream, how, access)
        assert found.provider == how
        return series.apply(self.store, one, found)

    def build(self, patched: Patched, folder: str) -> bytes:
        request = overlay.Request(self.wheel, None, "spark.1", (), None, EPOCH)
        out = self.folder / folder
        out.mkdir()
        layers = [overlay.Layer(patched, self.upstream.paths)]
        return overlay.build(request, layers, out).path.read_bytes()


def test_git_and_release_give_the_same_wheel(tmp_path: Path, store: Store) -> None:
    bench = Bench(tmp_path, store)
    one = bench.series_on(LINES)
    of_git, of_release = bench.patched("git", one), bench.patched("release", one)
    assert of_git.source.commit == bench.upstream.commit
    assert of_git.tree != of_release.tree  # the repository has more than a release, and less
    wheel = bench.build(of_git, "of git")
    assert wheel == bench.build(of_release, "of release")
    assert wheel != bench.wheel.read_bytes()


def test_repository_unlike_release_is_refused(tmp_path: Path, store: Store) -> None:
    theirs = LINES.replace(b"line_3 = 1", b"line_3 = 3")
    bench = Bench(tmp_path, store, repository=theirs)
    with pytest.raises(SeriesError) as refused:
        bench.patched("git", bench.series_on(LINES))
    assert "--source release" in refused.value.remedy
    shutil.rmtree(bench.folder / "patches")
    patched = bench.patched("git", bench.series_on(theirs))  # a patch that expects git's tree
    with pytest.raises(BuildError) as unlike:
        bench.build(patched, "out")
    member = member_of(bench.upstream.paths, TOUCHED)
    assert f"{bench.wheel.name}: {member} " in unlike.value.what
    assert "--source release" in unlike.value.remedy


# -- the words on the command line ------------------------------------------------------


def outputs(receipt: Any, label: str) -> Any:
    """Return what an item of a build gave."""
    return next(item["outputs"] for item in receipt["items"] if item["label"] == label)


def test_provider_is_in_plan_receipt_and_explain(project: Project) -> None:
    reach(project.repo)
    plan, _ = project.run(*BUILD, "--source", "git", "--dry-run")
    assert "sources: git\n" in plan
    assert "(fetches demo by git" in plan
    receipt = project.build("--source", "git")
    wheel = project.wheel.read_bytes()
    assert outputs(receipt, "source demo")["provider"] == "git"
    # as built last: nothing to make
    explain = ("explain", "--target", "tiny", "--engine", "none")
    explained = json.loads(project.run(*explain, "--json")[0])
    assert explained["source"] == "git"
    states = {step["label"]: step["state"] for step in explained["plan"]}
    assert {states[f"{kind} demo"] for kind in ("source", "series", "wheel")} == {"in the store"}
    again, _ = project.run(*explain, "--source", "release")
    assert "sources: release\n" in again
    assert "provider: git → release" in again
    assert outputs(project.build(), "source demo")["provider"] == "release"  # the target's own
    assert project.wheel.read_bytes() == wheel


def test_git_trees_are_recorded_on_request(project: Project) -> None:
    reach(project.repo)
    said = "".join(project.run(*BUILD, "--source", "git"))
    assert "warning" not in said
    assert "from git, not recorded in pins.yaml" in said
    project.run("pins", "record", "--source", "git")
    assert set(pins.load(project.root / "pins.yaml").upstream("demo").patched) == {"git"}
    assert "(as recorded)" in "".join(project.run(*BUILD, "--source", "git"))
    assert "as recorded" in "".join(project.run("patches", "check", "--source", "git"))
