"""The verdict on a patch on another release, and what looks like another one."""

import os
import sys
from pathlib import Path

import pytest

from sparkforge.maintain.releases import Verdict
from tests.integration.moving import NEW, STOPPED, Upstream, files_of, lines, with_line
from tests.project import FILES
from tests.support import Page

PLAIN = ("clean", "clash", "old_name", "gone")
OTHER = ("shift", "beside", "changed", "taken", "empty")
BASE = {name: lines(name) for name in (*PLAIN, *OTHER)}


def edit(name: str, number: int, text: bytes) -> bytes:
    return with_line(BASE[name], number, text)


OURS = {
    **{name: edit(name, 10, b"ours = 1") for name in PLAIN},
    "shift": edit("shift", 20, b"ours = 1"),
    "beside": edit("beside", 20, b"ours = 1"),
    "changed": with_line(edit("changed", 5, b"both = 1"), 25, b"ours = 1"),
    "taken": edit("taken", 10, b"both = 1"),
    "empty": edit("empty", 10, b"both = 1"),
}
THEIRS = {
    "shift": b"new = 0\n" * 9 + BASE["shift"],
    "beside": edit("beside", 18, b"theirs = 1"),
    "changed": edit("changed", 5, b"both = 1"),
    "taken": b"new = 0\n" * 9 + edit("taken", 10, b"both = 1"),
    "empty": with_line(edit("empty", 10, b"both = 1"), 12, b"theirs = 1"),
    "clash": edit("clash", 10, b"theirs = 1"),
    "old_name": None,
    "new_name": BASE["old_name"] + b"more = 1\n",
    "gone": None,
}


def test_every_verdict(upstream: Upstream) -> None:
    upstream.begin_with({f"demo/{name}.py": data for name, data in BASE.items()})
    upstream.series({f"{name} one": {f"demo/{name}.py": data} for name, data in OURS.items()})
    upstream.release({f"demo/{name}.py": data for name, data in THEIRS.items()})
    before = files_of(upstream.root)
    said = upstream.rebase("demo", "--onto", NEW, "--dry-run", code=STOPPED)
    found = dict(zip(OURS, said["patches"], strict=True))
    assert {name: (move["verdict"], move["stops"]) for name, move in found.items()} == {
        "clean": ("clean", False),
        "shift": ("clean", False),  # only its line numbers
        "beside": ("context-only", False),
        "changed": ("changed", False),
        "taken": ("upstreamed", False),
        "empty": ("upstreamed", False),
        "clash": ("conflict", True),
        "old_name": ("target-renamed", False),
        "gone": ("target-deleted", True),
    }
    assert {move["verdict"] for move in found.values()} == {verdict.value for verdict in Verdict}
    assert "demo/old_name.py is demo/new_name.py now" in found["old_name"]["detail"][0]
    assert "demo/gone.py is deleted" in found["gone"]["detail"]
    assert "1 overlap" in found["clash"]["detail"][0]
    assert files_of(upstream.root) == before
    assert not (upstream.root / "dist").exists()


def test_patches_after_a_conflict_are_tried_with_a_provisional_resolution(
    upstream: Upstream,
) -> None:
    text = FILES["demo/mod.py"]
    first = with_line(text, 5, b"ours = 1")
    second = with_line(first, 6, b"ours = 2")
    upstream.series(
        {
            "First one": {"demo/mod.py": first},
            "Second one": {"demo/mod.py": second},
            "Third one": {"demo/mod.py": with_line(second, 6, b"ours = 3")},
        }
    )
    upstream.release({"demo/mod.py": with_line(text, 5, b"theirs = 1")})
    said = upstream.rebase("demo", "--onto", NEW, "--dry-run", code=STOPPED)
    assert [move["verdict"] for move in said["patches"]] == ["conflict", "clean", "clean"]


def test_insertions_at_one_place_are_a_class_of_their_own(upstream: Upstream) -> None:
    text = lines("t")
    files = {"demo/t.py": text, "demo/u.py": text}
    upstream.begin_with(files)
    ours = {"demo/t.py": b"from ours import one\n" + text, "demo/u.py": b"ours = 1\n" + text}
    upstream.series({"One": ours})
    upstream.release({"demo/t.py": b"import it\n" + text, "demo/u.py": b"theirs = 1\n" + text})
    said = upstream.rebase("demo", "--onto", NEW, "--dry-run", code=STOPPED)
    assert said["patches"][0]["detail"] == ["demo/t.py: 1 imports", "demo/u.py: 1 both insert"]


def test_python_that_a_merge_breaks_is_reported(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    text = b"def f(layer):\n" + b"".join(b"    step_%d()\n" % i for i in range(20))
    names = b"step_0 = " + b" = ".join(b"step_%d" % i for i in range(1, 20)) + b" = print\n"
    text = names + text
    upstream.begin_with({"demo/t.py": text, "demo/u.py": b"def g():\n" + text})
    upstream.series(
        {
            "Use one": {"demo/t.py": with_line(text, 15, b"    step_13(layer)")},
            "Twice one": {"demo/u.py": b"def g():\n" + text + b"def late(): ...\n"},
        }
    )
    upstream.release({"demo/t.py": text.replace(b"(layer)", b"(layer_cls)")})
    said = upstream.rebase("demo", "--onto", NEW, "--dry-run")
    first, second = said["patches"]
    assert "demo/t.py: Undefined name `layer`" in first["detail"]
    assert second["detail"] == []  # as broken as on the old release


def test_a_name_that_vanished_is_reported(upstream: Upstream) -> None:
    text = lines("t")
    helper = b"def compute_answer(x):\n    return x\n\n\ndef kept_function(x):\n    return x\n"
    upstream.begin_with(
        {
            "demo/t.py": text,
            "demo/helper.py": helper,
            "demo/still.py": b"other_name = 1\n",
            "demo/gone.py": b"other_name = 2\nlocal_name = 3\nprosaic = 4\n",
            "tests/test_t.py": b"compute_answer(1)\n",
        }
    )
    ours = b"mine = compute_answer(kept_function(other_name))  # prosaic"
    upstream.series({"Use one": {"demo/t.py": with_line(text, 10, ours)}})
    upstream.release(
        {
            "demo/helper.py": helper.replace(b"compute_answer", b"find_answer"),
            "demo/gone.py": None,
        }
    )
    (move,) = upstream.rebase("demo", "--onto", NEW, "--dry-run")["patches"]
    gone = "uses compute_answer, which the new release no longer has"
    assert (move["verdict"], move["detail"]) == ("clean", [gone])
    upstream.release({"demo/helper.py": helper + b"more_of_it = 1\n"})
    (move,) = upstream.rebase("demo", "--onto", NEW, "--dry-run")["patches"]
    assert move["detail"] == []


def test_requirements_are_read_of_the_index_or_of_the_wheel(upstream: Upstream) -> None:
    upstream.series({"One": {"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"ours = 1")}})
    upstream.release({}, requires=["helper==2.0"])
    wheel, server = "/files/demo-2.0-py3-none-any.whl", upstream.project.server

    def found() -> list[str]:
        said = upstream.rebase("demo", "--onto", NEW, "--dry-run")
        return [one["what"] for one in said["companions"]]

    served = server.pages.pop(wheel)
    server.add(wheel, Page(b"x" * len(served.body)))
    page = server.pages["/simple/demo/"]
    name = wheel.rpartition("/")[2]
    page.body = page.body.replace(f">{name}".encode(), f" data-core-metadata=true>{name}".encode())
    server.add(f"{wheel}.metadata", Page(b"Requires-Dist: helper==3.0\n"))
    assert any("has helper (none): demo wants ==3.0" in what for what in found())
    server.pages[f"{wheel}.metadata"].statuses = [500]
    assert any(f"{name}: cannot read its METADATA" in what for what in found())
    page.body = page.body.replace(b" data-core-metadata=true", b"")
    server.add(wheel, served)
    assert any("has helper (none): demo wants ==2.0" in what for what in found())
