"""A small project whose series tests lengthen, and tests of its own that look at the tree."""

import json
import sys
from typing import Any

from sparkforge.core import git
from sparkforge.series import series
from tests.project import FILES, Project
from tests.support import BODY

MOD = FILES["demo/mod.py"]

# How a test gets at the patched tree: through the checkout and the store that it is pointed at.
TESTS = """\
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(os.environ.get("SPARKFORGE_CHECKOUT", Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "demo"
    subprocess.run(
        [sys.executable, "-m", "sparkforge", "patches", "apply", "demo", folder,
         "--pins", CHECKOUT / "pins.yaml", "--offline"], check=True)
    return (folder / "demo" / "mod.py").read_text()


@pytest.fixture
def twenty(module):
    if "line_20 = 1" in module:
        raise RuntimeError("not patched")


def test_first(module):
    assert "line_20 = 2" in module or "line_20 = 3" in module


def test_by_fixture(twenty):
    pass


class TestThird:
    def test_it(self, module):
        assert "line_20 = 3" in module


def test_blind(module):
    assert "line_0 = 1" in module


def test_wrong(module):
    assert "line_0 = 7" in module


def test_elsewhere():
    pytest.skip("needs what this machine has not")


def test_that_builds(module):
    if "line_29 = 9" not in module:
        from sparkforge.core.errors import FetchError
        raise FetchError("no network")
"""


class Shop:
    """A project, and patches that are put behind each other."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.text = MOD
        (project.root / "tests" / "test_it.py").write_text(TESTS)
        project.repo("checkout", "--quiet", "--detach", "v1.0")
        for old in project.patches.iterdir():
            old.unlink()

    def add(self, subject: str, old: bytes, new: bytes, test: str) -> str:
        """Put one patch behind the series; returns its name.

        Args:
            test: a function of tests/test_it.py, or a whole node id.
        """
        repo, folder = self.project.repo, self.project.patches
        assert self.text.count(old) == 1
        self.text = self.text.replace(old, new)
        body = BODY.replace(
            "tests/test_it.py::test_it", test if "/" in test else f"tests/test_it.py::{test}"
        )
        repo.commit({"demo/mod.py": self.text}, f"{subject}\n\n{body}")
        name, data = series.export(repo.path, "HEAD~1", "HEAD")[0]
        (folder / name).write_bytes(data)
        with (folder / "series").open("a") as listing:
            listing.write(f"{name}\n")
        return name

    def ablate(self, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
        """Record, ablate; returns the results by patch, and what was said."""
        self.project.run("pins", "record")
        out, err = self.project.run(
            "ablate", "--python", sys.executable, "--json", *words, code=code, timeout_s=300
        )
        return {one["patch"]: one for one in json.loads(out)["ablate"]}, err


def leftovers(project: Project) -> list[str]:
    """Return what a run left in the store that it should not have."""
    bare = project.store / "git" / "demo.git"
    refs = git.git(bare, "for-each-ref", "--format=%(refname)", "refs/patched").splitlines()
    trees = git.git(bare, "worktree", "list", "--porcelain").count("worktree ") - 1
    return [*map(str, (project.store / "tmp").iterdir()), *refs[1:], *["a worktree"] * trees]
