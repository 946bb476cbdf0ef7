"""Looking for newer releases of a small project on a loopback index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.project import FILES, Project
from tests.support import Page, Server, make_sdist, make_wheel, sha256

OTHER: Mapping[str, bytes] = {**FILES, "demo/more.py": b"y = 2\n"}
CONFLICT: Mapping[str, bytes] = {
    **FILES,
    "demo/mod.py": FILES["demo/mod.py"].replace(b"line_20 = 1", b"line_20 = 7"),
}


@pytest.fixture
def release(project: Project, tmp_path: Path) -> Any:
    """Put a release of the project on the index, beside those that are there."""

    def put(
        version: str, files: Mapping[str, bytes] | None = OTHER, *, yanked: str | None = None
    ) -> None:
        if files is None:  # its wheel has come, the sdist has not
            path = make_wheel(tmp_path / "new", "demo", version)
        else:
            path = make_sdist(tmp_path / "new", "demo", version, files)
        data = path.read_bytes()
        project.server.add(f"/files/{path.name}", Page(data))
        attribute = "" if yanked is None else f' data-yanked="{yanked}"'
        page = project.server.pages["/simple/demo/"]
        link = f'<a href="/files/{path.name}#sha256={sha256(data)}"{attribute}>{path.name}</a><br>'
        page.body = page.body.replace(b"</body>", link.encode() + b"</body>")

    return put


def watch(project: Project, *words: str, code: int = 0, **env: Any) -> tuple[Any, str]:
    before = {path: path.read_bytes() for path in sorted(project.root.rglob("*")) if path.is_file()}
    out, err = project.run("watch", "--json", *words, code=code, **env)
    after = {path: path.read_bytes() for path in sorted(project.root.rglob("*")) if path.is_file()}
    assert after == before  # it looks, and changes nothing
    document = json.loads(out)
    if code in (0, 6, 9):
        (one,) = document["watch"]
        return one, err
    return document["error"], err


def test_nothing_newer(project: Project, release: Any) -> None:
    for version in ("0.9", "1.1rc1"):
        release(version)
    release("1.2", yanked="broken")
    found, _ = watch(project)
    assert (found["state"], found["newest"]) == ("up to date", "1.0")
    # nothing but the list was asked for
    assert project.requests() == ["/simple/demo/"]


def test_a_release_that_every_patch_carries_over_to(project: Project, release: Any) -> None:
    release("1.1")
    found, err = watch(project, code=9)
    assert (found["state"], found["newest"]) == ("carries over", "1.1")
    assert [move["verdict"] for move in found["moves"]] == ["clean"]
    assert "change-a-line-of-the-module  clean" in err


def test_a_release_that_needs_a_person(project: Project, release: Any) -> None:
    release("1.1", CONFLICT)
    release("1.2", CONFLICT)
    found, err = watch(project, code=6)
    assert (found["state"], found["newest"]) == ("a person is needed", "1.2")
    (move,) = found["moves"]
    assert (move["verdict"], move["stops"]) == ("conflict", True)
    assert "! conflict" in err


def test_a_release_that_is_not_complete(project: Project, release: Any) -> None:
    release("1.1", None)
    found, _ = watch(project, code=6)
    assert found["state"].startswith("not complete yet: ")


def test_what_can_not_be_asked_is_no_news_but_an_error(
    project: Project, release: Any, server: Server
) -> None:
    release("1.1")
    page = project.server.pages["/simple/demo/"]
    page.statuses = [503] * 3
    watch(project, code=4)
    page.statuses = []
    # of two indexes one is down: what the other lists is not all there is
    server.add("/other/demo/", Page(b"", statuses=[500] * 3))
    watch(project, code=4, PIP_EXTRA_INDEX_URL=server.url("/other/"))
    # one that does not have the project is no failure
    watch(project, code=9, PIP_EXTRA_INDEX_URL=server.url("/none/"))
    watch(project, "--offline", code=4)
    # a list without the pinned release is not the whole list
    page.body = page.body.replace(b"demo-1.0", b"demo-0.5")
    error, _ = watch(project, code=4)
    assert "does not have 1.0" in error["what"]
