"""Leaving patches out of a small project's series."""

import sys

import pytest

from tests.project import Project
from tests.shop import Shop, leftovers

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


def test_tests_that_notice_and_tests_that_prove_nothing(shop: Shop) -> None:
    first = shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_by_fixture")
    third = shop.add("Make twenty three", b"line_20 = 2", b"line_20 = 3", "TestThird::test_it")
    (shop.project.root / "tests" / "test_seven.py").write_text(NEEDS_LINE_7)
    test = "tests/test_seven.py::TestSeven::test_inside"
    seven = shop.add("Make seven nine", b"line_7 = 1", b"line_7 = 9", test)
    verdicts = dict.fromkeys((first, third, seven), "noticed")
    for line, test, verdict in (
        (3, "test_blind", "not noticed"),
        (16, "test_wrong", "fails in any case"),
        (13, "test_elsewhere", "not run"),
        (29, "test_that_builds", "broken"),
    ):
        change = (b"line_%d = 1\n" % line, b"line_%d = 9\n" % line)
        verdicts[shop.add(f"Make line {line} new", *change, test)] = verdict
    found, _ = shop.ablate(code=9)
    assert {name: one["verdict"] for name, one in found.items()} == verdicts
    assert found[first]["dependents"] == [third]  # its lines are those of the first
    assert found[seven]["dependents"] == []
    assert "RuntimeError: not patched" in found[first]["without"]["message"]
    assert leftovers(shop.project) == []
    found, _ = shop.ablate(seven.removesuffix(".patch"))
    assert list(found) == [seven]


def test_refused(shop: Shop) -> None:
    shop.add("Make three nine", b"line_3 = 1", b"line_3 = 9", "test_missing")
    run = shop.project.run
    run("ablate", *PYTHON, "no-such", code=2)
    _, err = run("ablate", *PYTHON, code=6)
    assert "test_missing" in err
