"""The verdict on a patch on another release, and what looks like another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.maintain import drift
from sparkforge.maintain.findings import Verdict
from tests.integration.moving import NEW, STOPPED, Upstream, files_of, lines, with_line
from tests.project import FILES, Project


def verdict_case(project: Project) -> tuple[Upstream, dict[str, Mapping[str, bytes | None]]]:
    """A release and a series in which every verdict occurs."""
    names = [
        "clean",
        "shift",
        "beside",
        "changed",
        "taken",
        "empty",
        "clash",
        "old_name",
        "gone",
        "indent",
        "worded",
        "moved",
    ]
    base = {**FILES, **{f"demo/{name}.py": lines(name) for name in names}}
    up = Upstream(project, FILES)
    up.begin_with(base)

    def edit(name: str, number: int, text: bytes) -> bytes:
        return with_line(base[f"demo/{name}.py"], number, text)

    fix = [f"fixed_line_{i} = the_right_answer({i})".encode() for i in range(4)]
    patches: dict[str, Mapping[str, bytes | None]] = {
        "Clean one": {"demo/clean.py": edit("clean", 10, b"ours = 1")},
        "Shift one": {"demo/shift.py": edit("shift", 20, b"ours = 1")},
        "Beside one": {"demo/beside.py": edit("beside", 20, b"ours = 1")},
        "Changed one": {
            "demo/changed.py": with_line(edit("changed", 5, b"both = 1"), 25, b"ours = 1")
        },
        "Taken one": {"demo/taken.py": edit("taken", 10, b"both = 1")},
        "Empty one": {"demo/empty.py": edit("empty", 10, b"both = 1")},
        "Clash one": {"demo/clash.py": edit("clash", 10, b"ours = 1")},
        "Renamed one": {"demo/old_name.py": edit("old_name", 10, b"ours = 1")},
        "Gone one": {"demo/gone.py": edit("gone", 10, b"ours = 1")},
        "Indent one": {"demo/indent.py": edit("indent", 10, b"ours = 1")},
        "Worded one": {"demo/worded.py": edit("worded", 10, b"\n".join(fix))},
        "Moved one": {"demo/moved.py": edit("moved", 10, b"ours = 1")},
    }
    text = lines("moved").split(b"\n")
    up.release(
        {
            "demo/shift.py": b"new = 0\n" * 9 + base["demo/shift.py"],
            "demo/beside.py": edit("beside", 18, b"theirs = 1"),
            "demo/changed.py": edit("changed", 5, b"both = 1"),
            "demo/taken.py": b"new = 0\n" * 9 + edit("taken", 10, b"both = 1"),
            "demo/empty.py": with_line(edit("empty", 10, b"both = 1"), 12, b"theirs = 1"),
            "demo/clash.py": edit("clash", 10, b"theirs = 1"),
            "demo/old_name.py": None,
            "demo/new_name.py": base["demo/old_name.py"] + b"more = 1\n",
            "demo/gone.py": None,
            "demo/indent.py": b"if True:\n"
            + b"".join(b"    " + line + b"\n" for line in base["demo/indent.py"].splitlines()),
            "demo/worded.py": edit("worded", 10, b"\n".join([b"# our words", *fix[:3], b"pass"])),
            "demo/moved.py": b"\n".join(text[:5] + text[20:]),
            "demo/elsewhere.py": b"\n".join(text[5:20]) + b"\n",
        }
    )
    return up, patches


def test_every_verdict(project: Project) -> None:
    up, patches = verdict_case(project)
    up.series(patches)
    before = files_of(up.root)
    said = up.rebase("demo", "--onto", f"release:{NEW}", "--dry-run", code=STOPPED)
    found = {move["patch"].removesuffix("-one.patch"): move for move in said["patches"]}
    assert {name: (move["verdict"], move["stops"]) for name, move in found.items()} == {
        "clean": ("clean", False),
        "shift": ("clean", False),  # only its line numbers
        "beside": ("context-only", False),
        "changed": ("changed", False),
        "taken": ("upstreamed", False),
        "empty": ("upstreamed", False),
        "clash": ("conflict", True),
        "renamed": ("target-renamed", False),
        "gone": ("target-deleted", True),
        "indent": ("conflict", True),
        "worded": ("conflict", True),
        "moved": ("conflict", True),
    }
    assert {move["verdict"] for move in found.values()} == {verdict.value for verdict in Verdict}
    assert "demo/old_name.py is demo/new_name.py now" in found["renamed"]["detail"][0]
    assert "demo/gone.py is deleted" in found["gone"]["detail"]
    assert "only white space" in found["indent"]["detail"][0]
    assert "3 of the 4 lines" in found["worded"]["detail"][0]
    assert "demo/elsewhere.py:" in found["moved"]["detail"][0]
    assert all("1 overlap" in found[name]["detail"][0] for name in ("clash", "worded", "moved"))
    assert files_of(up.root) == before
    assert not (up.root / "dist").exists()


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
    said = upstream.rebase("demo", "--onto", "latest", "--dry-run", code=STOPPED)
    assert [move["verdict"] for move in said["patches"]] == ["conflict", "clean", "clean"]


@pytest.mark.parametrize(
    ("theirs", "ours", "kind"),
    [
        (b"import theirs\n", b"from ours import (\n    one,\n    two,\n)\n", "1 imports"),
        (b"#include <theirs>\n", b"#include <ours>\n", "1 imports"),
        (b"theirs = 1\n", b"ours = 1\n", "1 both insert"),
    ],
)
def test_insertions_at_one_place_are_a_class_of_their_own(
    upstream: Upstream, theirs: bytes, ours: bytes, kind: str
) -> None:
    upstream.begin_with({"demo/t.py": lines("t")})
    upstream.series({"One": {"demo/t.py": ours + lines("t")}})
    move = stops(upstream, {"demo/t.py": theirs + lines("t")})
    assert f"demo/t.py: {kind}: " in move["detail"][0]


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
    said = upstream.rebase("demo", "--onto", "latest", "--dry-run")
    first, second = said["patches"]
    assert "demo/t.py: Undefined name `layer`" in first["detail"]
    assert second["detail"] == []  # as broken as on the old release


def moves_in_history(up: Upstream, code: int = 0) -> dict[str, dict[str, Any]]:
    """Tag what the repository's main branch has as v2.0; returns the moves by patch."""
    repo = up.project.repo
    repo("tag", "v2.0", "main")
    said = up.rebase(
        "demo", "--onto", "v2.0", "--dry-run", "--mirror", f"demo={repo.path}", code=code
    )
    return {move["patch"].removesuffix("-one.patch"): move for move in said["patches"]}


FIX = b"\n".join(b"fixed_line_%d = the_right_answer(%d)" % (i, i) for i in range(4))


@pytest.mark.parametrize(
    ("then", "verdict"),
    [
        # what upstream did after it had made the same change: (message, file)
        ([], "upstreamed"),
        ([("Revert", None)], "clean"),
        ([("Go on", FIX.replace(b"(3)", b"(4)"))], "conflict"),
    ],
)
def test_a_change_that_upstream_made(
    upstream: Upstream, then: list[tuple[str, bytes | None]], verdict: str
) -> None:
    text, repo = lines("t"), upstream.project.repo
    upstream.begin_with({"demo/t.py": text})
    upstream.series({"Taken one": {"demo/t.py": with_line(text, 10, FIX)}})
    repo("checkout", "--quiet", "main")
    repo.commit({"demo/t.py": with_line(text, 10, FIX)}, "Take the change")
    for message, line in then:
        data = text if line is None else with_line(text, 10, line)
        repo.commit({"demo/t.py": data}, message)
    move = moves_in_history(upstream, STOPPED if verdict == "conflict" else 0)["taken"]
    assert move["verdict"] == verdict


BODY_OF_BOTH = b"".join(b"    step_%d()\n" % i for i in range(8))
TWINS = b"def first():\n" + BODY_OF_BOTH + b"\n\ndef second():\n" + BODY_OF_BOTH


def test_a_change_that_upstream_made_at_a_twin_place(upstream: Upstream) -> None:
    def guard(at: int, data: bytes = TWINS) -> bytes:
        return with_line(data, at, b"    step_3()\n    guard()")

    upstream.begin_with({"demo/twins.py": TWINS})
    upstream.series({"Guard one": {"demo/twins.py": guard(15)}})
    upstream.release({"demo/twins.py": guard(4)})
    (move,) = upstream.rebase("demo", "--onto", "latest", "--dry-run")["patches"]
    assert move["verdict"] == "clean"
    upstream.release({"demo/twins.py": guard(4, guard(15))})
    (move,) = upstream.rebase("demo", "--onto", "latest", "--dry-run")["patches"]
    assert move["verdict"] == "upstreamed"


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
    ours = b"""local_name = compute_answer(kept_function(other_name))  # prosaic: is this \
not a call'd kept_word?"""
    upstream.series({"Use one": {"demo/t.py": with_line(text, 10, ours)}})
    upstream.release(
        {
            "demo/helper.py": helper.replace(b"compute_answer", b"find_answer"),
            "demo/gone.py": None,
        }
    )
    (move,) = upstream.rebase("demo", "--onto", "latest", "--dry-run")["patches"]
    assert (move["verdict"], move["vanished"]) == ("clean", ["compute_answer"])
    upstream.release({"demo/helper.py": helper + b"more_of_it = 1\n"})
    (move,) = upstream.rebase("demo", "--onto", "latest", "--dry-run")["patches"]
    assert move["vanished"] == []


def stops(up: Upstream, files: Mapping[str, bytes | None], **more: Any) -> dict[str, Any]:
    """Publish a release on which the only patch stops; returns its move."""
    up.release(files, **more)
    (move,) = up.rebase("demo", "--onto", "latest", "--dry-run", code=STOPPED)["patches"]
    found: dict[str, Any] = move
    return found


def test_hints_name_what_came_with_the_new_release(upstream: Upstream) -> None:
    base = lines("t") + b"\n".join(b"added_line_%d = 1" % i for i in range(4)) + b"\n"
    ours = b"\n".join(b"added_line_%d = 1" % i for i in range(4))
    upstream.begin_with({"demo/t.py": base, "demo/beside.py": lines("t")})
    upstream.series({"One": {"demo/t.py": with_line(base, 10, ours)}})
    move = stops(upstream, {"demo/t.py": with_line(base, 10, b"theirs = 1")})
    # the lines that it adds, and those that it stands on, were elsewhere all the time
    assert move["detail"] == ["demo/t.py: 1 overlap: upstream changed the same lines"]
    move = stops(upstream, {"demo/t.py": base.replace(b"\n", b"\r\n")})
    assert "end in CR LF" in move["detail"][0]


def test_a_new_file_goes_where_its_folder_went(upstream: Upstream) -> None:
    base = {f"demo/parts/{name}.py": lines(name) for name in ("one", "two", "three")}
    upstream.begin_with(base)
    changed = with_line(base["demo/parts/one.py"], 10, b"ours = 1")
    upstream.series({"New one": {"demo/parts/one.py": changed, "demo/parts/new.py": b"new = 1\n"}})
    moved = {name.replace("parts", "pieces"): data for name, data in base.items()}
    upstream.release({**dict.fromkeys(base), **moved})
    (move,) = upstream.rebase("demo", "--onto", "latest", "--dry-run")["patches"]
    assert (move["verdict"], move["stops"]) == ("target-renamed", False)
    assert any("demo/pieces/new.py" in line for line in move["detail"])


@pytest.mark.parametrize("page", [{"ranges": False}, {"statuses": [500] * 9}])
def test_requirements_that_cannot_be_read_are_named(
    upstream: Upstream, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.series({"One": {"demo/mod.py": with_line(FILES["demo/mod.py"], 3, b"ours = 1")}})
    upstream.release({}, requires=["helper==2.0"])
    served = upstream.project.server.pages["/files/demo-2.0-py3-none-any.whl"]
    read = upstream.rebase("demo", "--onto", "latest", "--dry-run")["companions"]
    assert any("helper: none (wanted ==2.0)" in one["what"] for one in read)
    monkeypatch.setattr(drift, "_TAIL", 100)
    served.ranges = page.get("ranges", True)
    served.statuses = list(page.get("statuses", []))
    found = upstream.rebase("demo", "--onto", "latest", "--dry-run")["companions"]
    said = "demo-2.0-py3-none-any.whl: cannot read its "
    assert any(said in one["what"] for one in found)
