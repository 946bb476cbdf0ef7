"""Leaving patches out of a small project's series, and the search for one that matters."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from sparkforge.maintain.patchtests import Outcome, judge
from tests.project import Project
from tests.shop import Shop, leftovers
from tests.support import PATIENCE_S, ROOT

PYTHON = ("--python", sys.executable)
NEEDS_LINE_7 = """\
import os
from pathlib import Path

_CHECKOUT = Path(os.environ.get("SPARKFORGE_CHECKOUT", Path(__file__).resolve().parents[1]))
if "make-seven-nine.patch" not in (_CHECKOUT / "patches" / "demo" / "series").read_text():
    raise ImportError("no option --seven")


class TestSeven:
    def test_inside(self): ...
"""


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


def test_tests_that_notice(shop: Shop) -> None:
    first = shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_by_fixture")
    second = shop.add("Make five five", b"line_5 = 1", b"line_5 = 5", "test_second")
    third = shop.add("Make twenty three", b"line_20 = 2", b"line_20 = 3", "TestThird::test_it")
    (shop.project.root / "tests" / "test_seven.py").write_text(NEEDS_LINE_7)
    test = "tests/test_seven.py::TestSeven::test_inside"
    fourth = shop.add("Make seven nine", b"line_7 = 1", b"line_7 = 9", test)
    shop.project.build()
    last = {p.name: p.read_bytes() for p in (shop.project.store / "last").rglob("*.json")}
    found, _ = shop.ablate()
    assert list(found) == [first, second, third, fourth]
    assert {one["verdict"] for one in found.values()} == {"noticed"}
    assert found[first]["dependents"] == [third]  # its lines are those of the first
    assert found[second]["dependents"] == found[third]["dependents"] == []
    assert "RuntimeError: not patched" in found[first]["without"]["message"]
    whole, without = found[second]["whole"], found[second]["without"]
    assert (whole["passed"], whole["failed"]) == (2, 0)
    assert (without["passed"], without["failed"]) == (1, 1)
    assert leftovers(shop.project) == []
    # what explain reads of the newest build is that of the whole series
    now = {p.name: p.read_bytes() for p in (shop.project.store / "last").rglob("*.json")}
    assert now == last


def test_tests_that_prove_nothing(shop: Shop) -> None:
    verdicts = {
        "test_blind": "not noticed",
        "test_wrong": "fails in any case",
        "test_elsewhere": "not run",
        "test_that_builds": "broken",
        "test_nine": "noticed",
    }
    names = {
        test: shop.add(
            f"Make line {line} nine", b"line_%d = 1\n" % line, b"line_%d = 9\n" % line, test
        )
        for line, test in zip((3, 8, 13, 29, 18), verdicts, strict=True)
    }
    found, _ = shop.ablate(code=9)
    assert {test: found[name]["verdict"] for test, name in names.items()} == verdicts
    found, _ = shop.ablate(names["test_nine"].removesuffix(".patch"))
    assert list(found) == [names["test_nine"]]


def test_refused(shop: Shop) -> None:
    name = shop.add("Make three nine", b"line_3 = 1", b"line_3 = 9", "test_missing")
    run = shop.project.run
    run("ablate", *PYTHON, "no-such", code=2)
    run("ablate", *PYTHON, "--bisect", "true", "make-three-nine", code=2)
    run("ablate", *PYTHON, "--upstream", "no-such", code=2)
    run("ablate", *PYTHON, "--bisect", "true", "--target", "huge", code=2)
    _, err = run("ablate", *PYTHON, code=6)
    assert "test_missing" in err
    run("ablate", *PYTHON, code=2, SPARKFORGE_CHECKOUT=str(ROOT))
    patch = shop.project.patches / name
    patch.write_text(patch.read_text().replace("\nTest: ", "\nTested-by: "))
    _, err = run("ablate", *PYTHON, code=6)
    assert name in err


@pytest.mark.parametrize(
    ("whole", "without", "verdict"),
    [
        (Outcome(passed=2), Outcome(passed=1, failed=1), "noticed"),
        (Outcome(passed=2, skipped=1), Outcome(skipped=2, failed=1), "noticed"),
        (Outcome(passed=2), Outcome(passed=2), "not noticed"),
        (Outcome(passed=2), Outcome(skipped=2), "not run"),
        (Outcome(skipped=2), Outcome(failed=2), "not run"),
        (Outcome(passed=1, failed=1), Outcome(failed=2), "fails in any case"),
        (Outcome(failed=1, ours=True), Outcome(failed=2), "broken"),
        (Outcome(passed=1), Outcome(failed=1, ours=True), "broken"),
    ],
)
def test_verdicts(whole: Outcome, without: Outcome, verdict: str) -> None:
    assert judge(whole, without) == verdict


# -- bisecting ---------------------------------------------------------------------------------


@pytest.fixture
def chain(project: Project) -> Shop:
    """Eight patches on one line: each needs the one before."""
    shop = Shop(project)
    for i in range(1, 9):
        shop.add(f"Step {i}", b"line_20 = %d\n" % i, b"line_20 = %d\n" % (i + 1), "test_first")
    project.run("pins", "record")
    return shop


def bisect(shop: Shop, *words: str, code: int = 0) -> Any:
    out, _ = shop.project.run(
        "ablate", "--json", "--bisect", *words, code=code, timeout_s=PATIENCE_S
    )
    return json.loads(out)


def at_most(value: int) -> str:
    """A command of the shell's: is the line's value at most this?"""
    return f'test "$(sed -n "s/line_20 = //p" "$SPARKFORGE_TREES/demo/demo/mod.py")" -le {value}'


@pytest.mark.parametrize("number", [1, 6, 8])
def test_the_patch_that_breaks_or_fixes_a_command(chain: Shop, number: int) -> None:
    found = {"upstream": "demo", "patch": f"step-{number}.patch"}
    assert bisect(chain, at_most(number))["bisect"] == {"what": "breaks", **found}
    fixes = bisect(chain, f"! {at_most(number)}")["bisect"]
    assert fixes == {"what": "fixes", **found}
    assert leftovers(chain.project) == []


def test_commands_that_find_nothing(chain: Shop) -> None:
    bisect(chain, "true", code=9)  # no patch makes a difference
    bisect(chain, "exit 127", code=12)  # says nothing about a patch
