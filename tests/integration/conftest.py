"""Every test here runs apart from this machine's settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkforge.core import index
from tests.integration.moving import Upstream
from tests.integration.worktrees import Tree, work_tree
from tests.project import FILES, Project, new_project
from tests.support import Server


@pytest.fixture(autouse=True)
def _isolated(isolated: Path) -> None:
    """Use ``isolated`` everywhere."""


@pytest.fixture
def project(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A small project whose files lie on a loopback index that pip is configured for."""
    monkeypatch.setenv("PIP_INDEX_URL", server.url("/simple/"))
    index.pip_settings.cache_clear()
    return new_project(tmp_path, server)


@pytest.fixture
def tree(
    project: Project,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Tree]:
    """A work tree of the project's series."""
    monkeypatch.chdir(tmp_path)
    with work_tree(project, tmp_path / "work tree", capsys) as made:
        yield made


@pytest.fixture
def upstream(project: Project) -> Upstream:
    """A project with nothing but a changelog and the files of FILES."""
    (project.root / "CHANGELOG.md").write_text("# Changelog\n\n## next\n\n* Something.\n")
    return Upstream(project, FILES)
