"""`build --remote`: a second machine takes from the first one's store what has the right bytes."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from sparkforge.core.disk import key_of
from tests.project import FILES, Project
from tests.support import Page, Server, add_project, make_wheel, sha256


@dataclass
class Second:
    """A machine with an empty store, the wheel of the first one, and that one's served store."""

    project: Project
    wheel: bytes
    first: Any
    remote: Server

    @property
    def url(self) -> str:
        return self.remote.url("")

    def page(self, end: str) -> Page:
        """Return the served file whose path has this end."""
        (path,) = (path for path in self.remote.pages if path.endswith(end))
        return self.remote.pages[path]

    def build(self, *words: str) -> tuple[list[str], str]:
        """Build to the wheels; returns the state of each item, and the log."""
        build = ("build", "--target", "tiny", "--engine", "none", "--until", "wheels", "--json")
        out, err = self.project.run(*build, *words)
        assert self.project.wheel.read_bytes() == self.wheel
        receipt = json.loads(out)
        assert [item["outputs"] for item in receipt["items"]] == self.first
        return [item["state"] for item in receipt["run"]["items"].values()], err


def served(project: Project) -> Server:
    """Serve a project's store as any web server would; the project gets an empty one."""
    remote = Server()
    for path in project.store.rglob("*"):
        if path.is_file():
            where = quote(path.relative_to(project.store).as_posix())
            remote.add(f"/{where}", Page(path.read_bytes()))
    project.store = project.store.with_name("second")
    shutil.rmtree(project.root / "dist")
    project.requests()
    return remote


@pytest.fixture
def second(project: Project) -> Iterator[Second]:
    """Build on one machine; the other one has the same checkout."""
    first = [item["outputs"] for item in project.build()["items"]]
    wheel, remote = project.wheel.read_bytes(), served(project)
    yield Second(project, wheel, first, remote)
    remote.close()


@pytest.mark.parametrize("how", ["http", "file", "folder"])
def test_a_hit_needs_no_source_and_gives_the_same_bytes(second: Second, how: str) -> None:
    there = second.project.store.with_name("store")
    url = {"http": f"{second.url}/", "file": there.as_uri(), "folder": str(there)}[how]
    assert second.build("--remote", url)[0] == ["in the store"] * 3
    assert second.project.requests() == []
    asked = [path for path, _ in second.remote.requests]
    assert bool(asked) == (how == "http")
    assert not [path for path in asked if "/demo-1.0.tar" in path or "/git/" in path]
    assert not (second.project.store / "git/demo.git").exists()
    # nothing is missed afterwards, until something is made of the source
    assert second.build()[0] == ["in the store"] * 3
    assert second.project.requests() == []
    second.project.patch({"demo/mod.py": FILES["demo/mod.py"].replace(b"line_3 =", b"three =")})
    states = [item["state"] for item in second.project.build()["run"]["items"].values()]
    assert states == ["made"] * 3


def flip(page: Page) -> None:
    page.body = page.body[:-9] + bytes([page.body[-9] ^ 1]) + page.body[-8:]


def cut(page: Page) -> None:
    page.body = page.body[:-9]


def without(part: str, page: Page) -> None:
    """Make a record without a part, but with the right seal."""
    made = json.loads(page.body)
    del made["seal"], made[part]
    page.body = json.dumps({**made, "seal": key_of(made)}).encode()


def astray(page: Page, part: str = "file") -> None:
    """Have a record name a file elsewhere."""
    made = json.loads(page.body)
    made["outputs"][part] = "../../../../../escaped.whl"
    del made["seal"]
    page.body = json.dumps({**made, "seal": key_of(made)}).encode()


@pytest.mark.parametrize(
    ("end", "change", "said"),
    [
        (".3-py3-none-any.whl", flip, ".whl: sha256 is "),
        (".3-py3-none-any.whl", cut, ".whl: sha256 is "),
        ("wheels/{key}/artefact.json", flip, "its record is damaged"),
        *(
            ("wheels/{key}/artefact.json", partial(without, part), "its record is damaged")
            for part in ("outputs", "key")
        ),
        ("wheels/{key}/artefact.json", astray, "points outside its folder"),
        ("wheels/{key}/artefact.json", partial(astray, part="sha256"), "points outside its folder"),
    ],
)
def test_wrong_bytes_are_refused_and_the_item_is_built(
    second: Second, end: str, change: Callable[[Page], None], said: str
) -> None:
    (key,) = (
        one.name for one in second.project.store.with_name("store").glob("artefacts/wheels/*")
    )
    change(second.page(end.replace("{key}", key)))
    states, err = second.build("--remote", second.url)
    assert states == ["made"] * 3  # the sources, too: now the wheel is made of them
    (line,) = (line for line in err.splitlines() if "warning" in line)
    assert "wheel demo: not taken from http://127.0.0.1:" in line and said in line
    # the release files are in the remote store, with the sha256 that is pinned
    assert [path for path in second.project.requests() if path.startswith("/files/")] == []
    assert not [*second.project.root.parent.rglob("escaped.whl")]


def test_a_miss_and_a_wrong_download_come_from_the_index(second: Second) -> None:
    for path in [path for path in second.remote.pages if "/artefacts/" in path]:
        del second.remote.pages[path]
    flip(second.page("demo-1.0.tar.gz"))
    states, err = second.build("--remote", second.url)
    assert states == ["made"] * 3
    (line,) = (line for line in err.splitlines() if "warning" in line)
    assert "demo-1.0.tar.gz: sha256 is" in line and "fetching it elsewhere" in line
    asked = [path for path in second.project.requests() if path.startswith("/files/")]
    assert asked == ["/files/demo-1.0.tar.gz"]


def test_a_wheelhouse_needs_no_index(project: Project) -> None:
    wheel = make_wheel(project.root.parent / "dep", "dep", "1.0", {"dep/__init__.py": b""})
    add_project(project.server, "dep", {wheel.name: wheel.read_bytes()})
    lock = project.root / "requirements" / "tiny.txt"
    lock.write_text(f"dep==1.0 --hash=sha256:{sha256(wheel.read_bytes())}\n")
    first = project.build(until="wheelhouse")
    remote = served(project)
    again = project.build("--remote", remote.url(""), until="wheelhouse")
    assert again["items"] == first["items"] and project.requests() == []
    (path,) = project.store.glob(f"artefacts/wheelhouse/*/wheels/{wheel.name}")
    assert path.read_bytes() == wheel.read_bytes()
    remote.close()


def test_a_remote_that_is_gone_is_one_warning(second: Second) -> None:
    second.remote.close()
    states, err = second.build("--remote", second.url)
    assert states == ["made"] * 3
    assert f"  remote: {second.url}\n" in err  # before it waits for it
    (line,) = (line for line in err.splitlines() if "warning" in line)
    assert line.endswith("going on without it") and second.url in line


def test_no_network_and_a_remote_conflict(second: Second, tmp_path: Path) -> None:
    words = (
        "build",
        "--target",
        "tiny",
        "--engine",
        "none",
        "--offline",
        "--remote",
        str(tmp_path),
    )
    _, err = second.project.run(*words, code=2)
    assert "--remote and --offline conflict" in err


@pytest.mark.parametrize("where", ["no/such", "http:/x", "me@host:/store", "{root}", "{url}/x"])
def test_what_is_no_store_is_an_error(second: Second, where: str) -> None:
    where = where.format(root=second.project.root, url=second.url)
    words = ("build", "--target", "tiny", "--engine", "none", "--until", "wheels")
    _, err = second.project.run(*words, "--remote", where, code=2)
    assert "no CACHEDIR.TAG, so no store\n  hint: " in err
