"""Bisecting a small project's series whose patches need each other."""

from __future__ import annotations

import json
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from sparkforge.maintain.ablate.bisect import Answer, search
from tests.project import Project
from tests.shop import Shop, leftovers
from tests.support import PATIENCE_S, wait_for

NAMES = [f"step-{i}.patch" for i in range(1, 9)]


@pytest.fixture
def shop(project: Project) -> Shop:
    """Eight patches on one line: each needs the one before."""
    shop = Shop(project)
    for i in range(1, 9):
        shop.add(f"Step {i}", b"line_20 = %d\n" % i, b"line_20 = %d\n" % (i + 1), "test_first")
    project.run("pins", "record")
    return shop


def bisect(shop: Shop, *words: str, code: int = 0) -> tuple[Any, str]:
    out, err = shop.project.run(
        "ablate", "--json", "--bisect", *words, code=code, timeout_s=PATIENCE_S
    )
    return json.loads(out), err


def at_most(value: int) -> str:
    """A command of the shell's: is the line's value at most this?"""
    return f'test "$(sed -n "s/line_20 = //p" "$SPARKFORGE_TREES/demo/demo/mod.py")" -le {value}'


def test_the_patch_that_breaks_a_command(shop: Shop) -> None:
    document, err = bisect(shop, at_most(6))
    found = document["bisect"]
    assert found["found"] == {"upstream": "demo", "patch": "step-6.patch"}
    assert found["what"] == "breaks"
    # both ends first, then half of what is left each time
    assert [step["patches"] for step in found["steps"]] == [0, 8, 4, 6, 5]
    assert [step["answer"] for step in found["steps"]] == ["good", "bad", "good", "bad", "good"]
    assert all(step["seconds"] >= 0 for step in found["steps"])
    assert "demo: step-6.patch breaks" in err
    assert "with 4 patches, up to step-4.patch" in err
    assert leftovers(shop.project) == []
    assert not list((shop.project.store / "bisect").iterdir())


def test_the_patch_that_mends_a_command(shop: Shop, tmp_path: Path) -> None:
    script = tmp_path / "a folder" / "check it.sh"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\n! {at_most(3)}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    document, _ = bisect(shop, "--", str(script))
    assert document["bisect"]["found"]["patch"] == "step-3.patch"
    assert document["bisect"]["what"] == "mends"
    named = ("--good", "all", "--bad", "step-2")
    document, _ = bisect(shop, *named, "--", str(script))
    assert document["bisect"]["found"]["patch"] == "step-3.patch"
    assert [step["patches"] for step in document["bisect"]["steps"]] == [2, 8, 5, 3]


def test_prefixes_that_can_not_be_judged(shop: Shop) -> None:
    value = 'v=$(sed -n "s/line_20 = //p" "$SPARKFORGE_TREES/demo/demo/mod.py")'
    skips = f"{value}; [ $v = 5 ] && exit 125; [ $v -le 6 ]"
    document, _ = bisect(shop, skips)
    assert document["bisect"]["found"]["patch"] == "step-6.patch"
    skips = f"{value}; case $v in 5|6) exit 125;; esac; [ $v -le 5 ]"
    document, err = bisect(shop, skips, code=9)
    assert document["bisect"]["found"] is None
    assert [one["patch"] for one in document["bisect"]["candidates"]] == NAMES[3:6]
    assert "one of 3 patches breaks" in err


def test_ends_that_do_not_differ(shop: Shop) -> None:
    for command, answer in (("true", "good"), ("false", "bad")):
        document, _ = bisect(shop, command, code=9)
        what = document["error"]["what"]
        assert f"with no patch it is {answer}, with the whole series {answer}" in what
    document, _ = bisect(shop, "exit 125", code=9)
    assert "no patch cannot be judged" in document["error"]["what"]
    document, _ = bisect(shop, at_most(6), "--good", "all", code=9)
    assert "but --good all was given" in document["error"]["what"]
    # nothing of it is remembered: the next run asks anew
    assert not list((shop.project.store / "bisect").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_goes_on_where_it_was_interrupted(
    shop: Shop, tmp_path: Path, number: signal.Signals
) -> None:
    asked, hold = tmp_path / "asked", tmp_path / "hold"
    hold.touch()
    command = (
        f'echo "$SPARKFORGE_LEFT_OUT" | wc -w >> "{asked}"; '
        f'while [ -e "{hold}" ] && [ "$(wc -l < "{asked}")" -ge 3 ]; do sleep 0.05; done; '
        f"{at_most(6)}"
    )
    child = shop.project.start("ablate", "--bisect", command)
    wait_for(lambda: asked.exists() and len(asked.read_text().split()) == 3)
    child.send_signal(number)
    if number == signal.SIGINT:
        assert child.wait(PATIENCE_S) == 130
    child.communicate(timeout=PATIENCE_S)
    hold.unlink()
    time.sleep(0.2)  # a command that outlived kill -9 has seen it by now
    assert [int(word) for word in asked.read_text().split()] == [8, 0, 4]

    document, err = bisect(shop, command)
    steps = document["bisect"]["steps"]
    assert document["bisect"]["found"]["patch"] == "step-6.patch"
    assert [step["resumed"] for step in steps] == [True, True, False, False, False]
    assert "continuing with 2 known steps" in err
    assert [int(word) for word in asked.read_text().split()] == [8, 0, 4, 4, 2, 3]
    assert leftovers(shop.project) == []


def test_what_is_known_is_of_one_command_and_series(shop: Shop, tmp_path: Path) -> None:
    script = tmp_path / "check.sh"

    def interrupted(text: str) -> None:
        script.write_text(text)
        # a third step that can't run ends the search; the two ends are known by then
        bisect(shop, "--", "sh", str(script), code=12)

    fails = f'case "$SPARKFORGE_LEFT_OUT" in step-5*) exit 127;; esac; {at_most(6)}'
    interrupted(fails)
    _, err = bisect(shop, "--", "sh", str(script), code=12)
    assert "continuing with 2 known steps" in err
    (state,) = (shop.project.store / "bisect").glob("*.json")
    known = json.loads(state.read_text())
    state.write_text(json.dumps({**known, "0": {"answer": "perhaps"}, "99": known["0"]}))
    _, err = bisect(shop, "--", "sh", str(script), code=12)
    assert "continuing with 1 known step " in err
    _, err = bisect(shop, "--again", "--", "sh", str(script), code=12)
    assert "continuing" not in err
    script.write_text(at_most(6))
    document, err = bisect(shop, "--", "sh", str(script))
    assert "continuing" not in err
    assert document["bisect"]["found"]["patch"] == "step-6.patch"


def test_every_place_is_found_in_few_steps() -> None:
    """Sixteen patches, any of which may be the one, and any skipped besides."""
    for wanted in range(1, 17):
        for skipped in range(17):
            asked: list[int] = []

            def ask(at: int, wanted: int = wanted, skipped: int = skipped) -> Answer:
                asked.append(at)  # noqa: B023 - called before the next turn
                if at == skipped and 0 < at < 16:
                    return "skip"
                return "good" if at < wanted else "bad"

            low, high = search((0, 16), ask)
            assert low < wanted <= high
            assert high - low == 1 or skipped in (wanted - 1, wanted)
            assert len(asked) <= 7
