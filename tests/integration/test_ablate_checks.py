"""Leaving subsets of a small project's series out, and running commands on what is left."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.project import Project
from tests.shop import Shop, leftovers
from tests.support import PATIENCE_S

NEEDS_LINE_7 = """\
import os
import subprocess
import sys
from pathlib import Path

_CHECKOUT = Path(os.environ.get("SPARKFORGE_CHECKOUT", Path(__file__).resolve().parents[1]))
if "make-seven-nine.patch" not in (_CHECKOUT / "patches" / "demo" / "series").read_text():
    raise ImportError("no option --seven")


def test_seven(): ...


class TestSeven:
    def test_inside(self): ...
"""


@pytest.fixture
def shop(project: Project) -> Shop:
    """Three patches; the third changes a line of the first."""
    shop = Shop(project)
    shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_by_fixture")
    shop.add("Make five five", b"line_5 = 1", b"line_5 = 5", "test_second")
    shop.add("Make twenty three", b"line_20 = 2", b"line_20 = 3", "TestThird::test_it")
    project.run("pins", "record")
    return shop


def ablate(shop: Shop, *words: str, code: int = 0) -> tuple[Any, str]:
    out, err = shop.project.run("ablate", "--json", *words, code=code, timeout_s=PATIENCE_S)
    return json.loads(out), err


PYTHON = ("--python", sys.executable)


def test_a_subset_is_left_out_at_once(shop: Shop) -> None:
    document, err = ablate(shop, *PYTHON, "--without", "make-twenty-two, make-five-five.patch")
    first, second = document["ablate"]
    assert [first["patch"], second["patch"]] == ["make-twenty-two.patch", "make-five-five.patch"]
    assert {one["verdict"] for one in (first, second)} == {"noticed"}
    assert first["left_out"] == ["make-twenty-two.patch", "make-five-five.patch"]
    assert first["left_out_too"] == ["make-twenty-three.patch"]
    assert "does not merge without it, left out, too: make-twenty-three.patch" in err
    assert leftovers(shop.project) == []


def test_whether_the_rest_merges(shop: Shop) -> None:
    document, _ = ablate(shop, "--merge-only", "--without", "make-twenty-three,make-five-five")
    (one,) = document["merge"]
    assert one["left_out_too"] == []
    assert list(one["trees"]) == ["demo"]
    document, _ = ablate(shop, "--merge-only", code=9)  # each in turn
    assert [one["left_out_too"] for one in document["merge"]] == [
        ["make-twenty-three.patch"],
        [],
        [],
    ]
    assert leftovers(shop.project) == []


SEES = """
test "$(cat "$SPARKFORGE_CHECKOUT/patches/demo/series" | wc -l)" = "$1" || exit 3
test -d "$SPARKFORGE_STORE/downloads" || exit 4
echo "left out: $SPARKFORGE_LEFT_OUT."
grep -q 'line_5 = 5' "$SPARKFORGE_TREES/demo/demo/mod.py"
"""


def test_a_command_sees_what_is_left(shop: Shop) -> None:
    look = ("sh", "-c", "grep -q 'line_5 = 5' \"$SPARKFORGE_TREES/demo/demo/mod.py\"")
    document, _ = ablate(shop, "--", *look, code=9)
    found = {one["patch"]: one["verdict"] for one in document["ablate"]}
    assert found == {
        "make-twenty-two.patch": "not noticed",
        "make-five-five.patch": "noticed",
        "make-twenty-three.patch": "not noticed",
    }
    both = ("--without", "make-five-five,make-twenty-three")
    sees = SEES.replace("$1", '$([ -z "$SPARKFORGE_LEFT_OUT" ] && echo 3 || echo 1)')
    document, err = ablate(shop, *both, "--", "sh", "-c", sees)
    (one,) = document["ablate"]
    assert one["patch"] == "make-five-five.patch + make-twenty-three.patch"
    assert one["without_patch"]["message"] == "exit code 1"
    assert "left out: make-five-five.patch make-twenty-three.patch." in err
    assert "left out: ." in err
    assert leftovers(shop.project) == []


def test_a_command_gets_the_wheels_that_it_asks_for(shop: Shop) -> None:
    code = (
        "import os, sys, zipfile, pathlib;"
        "(wheel,) = pathlib.Path(os.environ['SPARKFORGE_WHEELS']).glob('*.whl');"
        "sys.exit(b'line_5 = 5' not in zipfile.ZipFile(wheel).read('demo/mod.py'))"
    )
    wanted = ("--target", "tiny", "--provide", "wheels")
    document, _ = ablate(shop, "make-five-five", *wanted, "--", sys.executable, "-c", code)
    assert document["ablate"][0]["verdict"] == "noticed"
    assert not (shop.project.root / "dist").exists()  # what dist holds is of the whole series


def test_a_command_that_can_not_tell_and_one_that_can_not_run(shop: Shop) -> None:
    hesitant = 'test -z "$SPARKFORGE_LEFT_OUT" || exit 125'
    document, _ = ablate(shop, "make-five-five", "--", "sh", "-c", hesitant, code=9)
    assert document["ablate"][0]["verdict"] == "not run"
    document, _ = ablate(shop, "make-five-five", "--", "false", code=9)
    assert document["ablate"][0]["verdict"] == "fails in any case"
    for words in (("sh", "-c", "kill -9 $$"), ("sh", "-c", "no-such-program-xyz")):
        document, _ = ablate(shop, "make-five-five", "--", *words, code=12)
        assert "which says nothing about a patch" in document["error"]["what"]
    document, _ = ablate(shop, "make-five-five", "--", "no-such-program-xyz", code=8)
    assert leftovers(shop.project) == []


def test_a_test_file_that_needs_the_patch_to_be_imported(shop: Shop) -> None:
    (shop.project.root / "tests" / "test_seven.py").write_text(NEEDS_LINE_7)
    body_test = "tests/test_seven.py::test_seven"
    shop.add("Make seven nine", b"line_7 = 1", b"line_7 = 9", body_test)
    shop.project.run("pins", "record")
    document, _ = ablate(shop, *PYTHON, "--without", "make-seven-nine,make-five-five")
    five, seven = document["ablate"]
    assert (five["verdict"], seven["verdict"]) == ("noticed", "noticed")
    assert seven["without_patch"]["message"] == "ImportError: no option --seven"
    # with the whole series such an error is one of the test, not a proof of anything
    (shop.project.root / "tests" / "test_seven.py").write_text("import nothing_there\n")
    child = shop.project.start("ablate", *PYTHON, "make-seven-nine")
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 6
    assert "did not run" in err
    assert "nothing_there" in err


WRONG: list[tuple[list[str], str]] = [
    (["make-five-five", "--without", "make-five-five"], "conflict"),
    (["--without", " , "], "gives no patch"),
    (["--without", "no-such"], "no-such.patch: no such patch"),
    (["--smoke"], "needs a target"),
    (["--smoke", "--target", "tiny"], "target tiny has no smoke test"),
    (["--smoke", "--target", "tiny", "--", "true"], "conflict"),
    (["--provide", "wheels", "--", "true"], "needs a target"),
    (["--target", "huge", "--provide", "wheels", "--", "true"], "no such target"),
    (["--good", "all", "--", "true"], "--good needs --bisect"),
    (["--bisect"], "without a command"),
    (["--"], "no command after --"),
    (["--bisect", "--"], "no command after --"),
    (["--bisect", "true", "--", "true"], "a command after --"),
    (["--bisect", "true", "--without", "make-five-five"], "conflict"),
    (["--bisect", "true", "--good", "no-such"], "no-such.patch: no such patch"),
    (["--bisect", "true", "--good", "none", "--bad", "none"], "are the same"),
    (["--upstream", "no-such"], "no such upstream"),
]


def test_words_that_make_no_sense(shop: Shop) -> None:
    for words, what in WRONG:
        document, _ = ablate(shop, *words, code=2)
        assert what in document["error"]["what"], words
