"""A series moved to another release: answers, refusals, kills."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from sparkforge.core import disk, git
from sparkforge.maintain import landing
from sparkforge.pins.pins import load
from sparkforge.series import series
from tests.forked import killed
from tests.integration.moving import COMMIT, NEW, STOPPED, Upstream, files_of, with_line
from tests.project import FILES
from tests.support import BODY, Repo, sha256

# -- a whole rebase ------------------------------------------------------------------------


def clash(up: Upstream) -> None:
    """A series of three on a release that changes the same line as the second."""
    text = FILES["demo/mod.py"]
    other = {"demo/__init__.py": FILES["demo/__init__.py"] + b"y = 2\n"}
    (up.root / "tests/test_second.py").write_text("def test_it() -> None: ...\n")
    up.series(
        {
            "First one": other,
            "Second one": {"demo/mod.py": with_line(text, 20, b"ours = 1")},
            "Third one": {"demo/third.py": b"third = 3\n"},
        },
        {"Second one": "tests/test_second.py::test_it"},
    )
    up.release({"demo/mod.py": with_line(b"new = 0\n" + text, 21, b"theirs = 1")})


FIRST = "20200101T000000Z"
RESOLVED = with_line(b"new = 0\n" + FILES["demo/mod.py"], 21, b"both = 1")


def resolve(up: Upstream, data: bytes = RESOLVED) -> None:
    (up.root / "dist/rebase/demo/tree/demo/mod.py").write_bytes(data)


def check_landed(up: Upstream, names: list[str]) -> None:
    """Hold what a rebase wrote against the release, and against the rest of sparkforge."""
    loaded = load(up.root / "pins.yaml")
    demo = loaded.upstreams["demo"]
    assert (demo.tag, demo.version, demo.commit) == ("v2.0", NEW, COMMIT)
    assert loaded.release.counter == 4
    for file in demo.files.values():
        data = (up.root.parent / "release" / file.file).read_bytes()
        assert (file.sha256, file.size) == (sha256(data), len(data))
    assert [patch.name for patch in series.read(up.project.patches).patches] == names
    up.project.run("patches", "check")
    assert "* demo v1.0 → v2.0." in (up.root / "CHANGELOG.md").read_text()
    assert not (up.root / "dist/rebase/demo").exists()


def test_conflict_continue_land(upstream: Upstream) -> None:
    clash(upstream)
    before = files_of(upstream.root)
    comment = "release: {counter: 3"
    assert comment in (upstream.root / "pins.yaml").read_text()
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    assert files_of(upstream.root) == before
    folder = upstream.root / "dist/rebase/demo"
    assert b"<<<<<<<" in (folder / "tree/demo/mod.py").read_bytes()
    status = upstream.rebase("demo", code=STOPPED)
    assert "demo: second-one.patch: conflict" in status["error"]["what"]
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)  # it waits for an answer
    upstream.rebase("demo", "--continue", code=2)  # markers are left
    upstream.rebase("demo", "--onto", "1.0", code=2)  # another one is under way
    resolve(upstream)
    said = upstream.rebase("demo", "--continue")
    assert said["landed"]
    verdicts = [move["verdict"] for move in said["series"]["demo"]["patches"]]
    assert verdicts == ["clean", "conflict", "clean"]
    check_landed(upstream, ["first-one.patch", "second-one.patch", "third-one.patch"])


def test_skip_and_its_reason(upstream: Upstream) -> None:
    clash(upstream)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    upstream.rebase("demo", "--skip", " ", code=2)
    upstream.rebase("demo", "--skip", "nobody\nneeds it")
    check_landed(upstream, ["first-one.patch", "third-one.patch"])
    text = (upstream.root / "CHANGELOG.md").read_text()
    assert "dropped second-one (conflict): left out: nobody needs it" in text
    assert not (upstream.project.patches / "second-one.patch").exists()


def test_all_of_it_upstreamed(upstream: Upstream) -> None:
    upstream.series({"Taken one": {"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"x = 1")}})
    upstream.release({"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"x = 1")})
    upstream.project.run("pins", "record")
    pins, apt = upstream.root / "pins.yaml", "suites: [x]"
    image = f"tag: x, index: sha256:{'1' * 64}, apt: {{{apt}, components: [x], snapshot: {FIRST}}}"
    pins.write_text(
        pins.read_text().replace("images: {}", f"images: {{x: {{repository: x, {image}}}}}")
    )
    upstream.rebase("demo", "--onto", NEW)
    check_landed(upstream, [])
    landed = load(pins)
    assert not landed.upstreams["demo"].patched
    moved = landed.images["x"].apt
    assert moved is not None and moved.snapshot > FIRST  # of the day of the rebase
    assert "dropped taken-one (upstreamed)" in (upstream.root / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # 1.0 is 2.0 now; the counter is 4 once release 3 was made
        ("## 1.0-spark.3 (unreleased)\n\n* A.\n", "## 2.0-spark.3 (unreleased)\n\nLINE* A.\n"),
        (
            "## 1.0-spark.3 (2026-11-23)\n\n* A.\n",
            "## 2.0-spark.4 (unreleased)\n\nLINE\n## 1.0-spark.3 (2026-11-23)\n\n* A.\n",
        ),
    ],
    ids=["unreleased", "released"],
)
def test_the_line_goes_below_the_release_that_is_built_now(
    upstream: Upstream, before: str, after: str
) -> None:
    upstream.series({"First one": {"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"x = 1")}})
    upstream.release({"demo/other.py": b"y = 1\n"})
    upstream.project.run("pins", "record")
    page = upstream.root / "CHANGELOG.md"
    page.write_text(f"# Changelog\n\n{before}".rstrip("\n") + "\n")
    upstream.rebase("demo", "--onto", NEW)
    line = "* demo v1.0 → v2.0.\n"
    assert page.read_text() == f"# Changelog\n\n{after.replace('LINE', line)}"


def test_the_same_conflict_is_resolved_the_same(upstream: Upstream, tmp_path: Path) -> None:
    clash(upstream)
    untouched = tmp_path / "before"
    shutil.copytree(upstream.root, untouched)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    upstream.rebase("demo", "--continue")
    mine = files_of(upstream.root)
    shutil.copytree(upstream.root / "dist/rebase/rerere", untouched / "dist/rebase/rerere")
    upstream.project.root = untouched
    said = upstream.rebase("demo", "--onto", NEW)
    assert said["series"]["demo"]["patches"][1]["answer"] == "remembered"
    assert files_of(untouched) == mine


def test_an_answer_may_be_a_commit(upstream: Upstream) -> None:
    clash(upstream)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    tree = Repo.__new__(Repo)
    tree.path = upstream.root / "dist/rebase/demo/tree"
    (tree.path / "demo/extra.py").write_bytes(b"extra = 1\n")
    upstream.rebase("demo", "--continue", code=2)  # a new file: meant, or left by an editor?
    tree("add", "demo/extra.py")
    # committed by hand, with words of its own
    tree("commit", "--quiet", "--all", "-F", "-", stdin=f"Another subject\n\n{BODY}".encode())
    upstream.rebase("demo", "--continue")
    check_landed(upstream, ["first-one.patch", "another-subject.patch", "third-one.patch"])


def test_git_itself_may_go_on(upstream: Upstream) -> None:
    clash(upstream)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    tree = Repo.__new__(Repo)
    tree.path = upstream.root / "dist/rebase/demo/tree"
    tree("add", "--all")
    tree("-c", "core.editor=true", "rebase", "--continue")
    said = upstream.rebase("demo", "--continue")
    assert [move["verdict"] for move in said["series"]["demo"]["patches"]][1] == "conflict"
    assert "dropped" not in (upstream.root / "CHANGELOG.md").read_text()
    check_landed(upstream, ["first-one.patch", "second-one.patch", "third-one.patch"])


def test_a_deleted_file_is_answered_by_hand(upstream: Upstream) -> None:
    text = FILES["demo/mod.py"]
    upstream.series({"First one": {"demo/mod.py": with_line(text, 3, b"ours = 1")}})
    upstream.release({"demo/mod.py": None})
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    tree = Repo.__new__(Repo)
    tree.path = upstream.root / "dist/rebase/demo/tree"
    upstream.rebase("demo", "--continue", code=2)  # nobody has said what is meant
    tree("rm", "--quiet", "demo/mod.py")
    upstream.rebase("demo", "--continue", code=2)  # nothing is left: that is --skip
    tree("reset", "--quiet", "--hard")
    (tree.path / "demo/__init__.py").write_bytes(FILES["demo/__init__.py"] + b"ours = 1\n")
    tree("add", "--all")
    upstream.rebase("demo", "--continue")
    check_landed(upstream, ["first-one.patch"])


CMAKE = b"""\
set(EXTRA_TAG "%s")
FetchContent_Declare(
  extra
  GIT_REPOSITORY https://127.0.0.1:9/extra.git
  GIT_TAG ${EXTRA_TAG}
)
FetchContent_Declare(tagged GIT_REPOSITORY https://127.0.0.1:9/tagged GIT_TAG %s)
"""


def test_what_no_longer_agrees(upstream: Upstream) -> None:
    old, new = b"1" * 40, b"2" * 40
    upstream.begin_with(
        {
            "cmake/extra.cmake": CMAKE % (old, b"v1.0"),
        }
    )
    upstream.project.edit_pins(
        "    paths:\n",
        f"""\
    externals:
      extra:
        git: https://127.0.0.1:9/extra.git
        commit: {old.decode()}  # kept
        redirect: EXTRA_DIR
      tagged:
        git: https://127.0.0.1:9/tagged.git
        tag: v1.0
        commit: {old.decode()}
        redirect: TAGGED_DIR
    paths:
""",
    )
    lock = upstream.root / "requirements" / "tiny.txt"
    plan = "        local: spark\n"
    upstream.project.edit_pins(plan, plan + "        drop_requires: [dropped]\n")
    pinned = {"helper": "1.0", "kept": "1.5+cpu", "ranged": "3.0"}
    lock.write_text(
        "".join(
            f"{name}=={version} \\\n    --hash=sha256:{'0' * 64}\n"
            for name, version in pinned.items()
        )
    )
    upstream.series({"First one": {"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"x = 1")}})
    upstream.release(
        {
            "cmake/extra.cmake": CMAKE % (new, b"v2.0"),
        },
        requires=[
            "helper==2.0",
            "kept==1.5",
            "ranged<3,>=1; python_version >= '3.11'",
            "dropped==9.0",
            "elsewhere==1.0; sys_platform == 'win32'",
            "more==1.0; extra == 'more'",
            "lacking>=2",
        ],
    )
    said = upstream.rebase("demo", "--onto", NEW, "--dry-run")
    found = {one["what"]: one for one in said["companions"]}
    assert [one for one in found if one.startswith("requirements/")] == [
        "requirements/tiny.txt has helper 1.0: demo wants ==2.0",
        "requirements/tiny.txt has ranged 3.0: demo wants <3,>=1",
        "requirements/tiny.txt has lacking (none): demo wants >=2",
    ]
    assert any(one.startswith("CMake: ") and "GIT_TAG v2.0" in one for one in found)
    upstream.rebase("demo", "--onto", NEW)
    text = (upstream.root / "pins.yaml").read_text()
    assert f"commit: {new.decode()}  # kept" in text
    assert text.count(old.decode()) == 1  # a tag's commit is nothing that the tree says


# -- refusals ------------------------------------------------------------------------------


REFUSED = [
    (["demo", "--onto", "7.7"], 2),  # the index lists no such release
    (["demo", "--onto", "1.0"], 2),  # it is pinned already
    (["demo", "--onto", NEW, "--offline"], 4),
    (["demo", "--onto", "newest"], 2),  # not a version
    (["demo", "--continue"], 2),  # none under way
    (["demo", "--skip", "why"], 2),
    (["demo", "--onto", NEW, "--dry-run", "--with-companions"], 2),
    (["nobody", "--onto", NEW], 2),
]


def test_refused(upstream: Upstream) -> None:
    clash(upstream)
    before = files_of(upstream.root)
    for words, code in REFUSED:
        said = upstream.rebase(*words, code=code)
        assert said["error"]["remedy"]
    assert files_of(upstream.root) == before
    assert not (upstream.root / "dist/rebase/demo").exists()


def under_git(up: Upstream) -> Repo:
    """Put the checkout under git, with all committed."""
    git = Repo.__new__(Repo)
    git.path = up.root
    git("init", "--quiet", "--template=", "--initial-branch=main")
    git("config", "user.name", "Ada")
    git("config", "user.email", "ada@example.invalid")
    (up.root / ".gitignore").write_text("dist/\n.sparkforge/\n")
    git("add", "--all")
    git("commit", "--quiet", "-m", "all")
    return git


def test_a_landing_is_one_commit_on_a_clean_checkout(upstream: Upstream) -> None:
    clash(upstream)
    git = under_git(upstream)
    (upstream.root / "CHANGELOG.md").write_text("# Changelog\n")
    said = upstream.rebase("demo", "--onto", NEW, code=2)
    assert "uncommitted changes" in said["error"]["what"]
    git("checkout", "--quiet", ".")
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    with (upstream.root / "pins.yaml").open("a") as pins:
        pins.write("# a thought\n")
    upstream.rebase("demo", "--continue", code=2)  # dirty at the end counts, too
    git("commit", "--quiet", "--all", "-m", "a thought")
    (upstream.root / "mine").write_text("not ours\n")
    said = upstream.rebase("demo", "--continue")
    assert (upstream.root / "pins.yaml").read_text().endswith("# a thought\n")
    assert git("log", "-1", "--format=%s").strip() == "Move demo to v2.0"
    assert "second-one: conflict (resolved by hand)" in git("log", "-1", "--format=%b")
    assert git("status", "--porcelain").strip() == "?? mine"
    changed = git("show", "--format=", "--name-only", "HEAD").split()
    assert sorted(changed) == sorted(
        str(Path(path).relative_to(upstream.root)) for path in said["changed"]
    )


def test_what_stops_a_continue(upstream: Upstream) -> None:
    clash(upstream)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    with FileLock(upstream.root / "dist/rebase/lock"):
        said = upstream.rebase("demo", "--continue", code=2)
    assert "another rebase is running" in said["error"]["what"]
    listing = upstream.project.patches / "series"
    listing.write_text(listing.read_text().replace("third-one.patch\n", ""))
    (upstream.project.patches / "third-one.patch").unlink()
    said = upstream.rebase("demo", "--continue", code=2)
    assert "changed after the rebase started" in said["error"]["what"]
    (upstream.root / "dist/rebase/demo/plan.json").write_text("{")
    upstream.rebase("demo", "--continue", code=11)
    before = files_of(upstream.root)
    assert upstream.rebase("demo", "--abort") == {"aborted": True}
    assert upstream.rebase("demo", "--abort") == {"aborted": False}
    assert upstream.rebase("demo") == {"upstream": "demo", "under_way": False}
    assert files_of(upstream.root) == before
    left = sorted(path.name for path in (upstream.root / "dist/rebase").iterdir())
    assert left == ["lock", "rerere"]


# -- kill -9 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(git, "attempt", 1), (disk, "write_file", 2), (landing, "call", 2)],
    ids=["git rebase", "files", "commit"],
)
def test_killed(upstream: Upstream, tmp_path: Path, module: Any, name: str, number: int) -> None:
    clash(upstream)
    checkout = under_git(upstream)
    upstream.rebase("demo", "--onto", NEW, code=STOPPED)
    resolve(upstream)
    answered = tmp_path / "answered"
    shutil.copytree(upstream.root, answered)
    upstream.rebase("demo", "--continue")
    wanted = files_of(upstream.root)
    shutil.rmtree(upstream.root)
    shutil.copytree(answered, upstream.root)

    def install(patch: pytest.MonkeyPatch) -> None:
        left, real = [number], getattr(module, name)

        def counting(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        patch.setattr(module, name, counting)

    assert killed(lambda: upstream.rebase("demo", "--continue"), install)
    checkout("reset", "--quiet", "--hard")  # files that are written and not committed
    checkout("clean", "--quiet", "-fd")
    upstream.rebase("demo", "--continue")
    assert files_of(upstream.root) == wanted
