"""Leaving patches out of a small project's series: its own tests must notice, or are told."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import pytest

from sparkforge.maintain.ablate.outcome import Outcome, _gist, judge
from tests.project import Project
from tests.shop import Shop, leftovers
from tests.support import ROOT


@pytest.fixture
def shop(project: Project) -> Shop:
    return Shop(project)


def test_tests_that_notice(shop: Shop) -> None:
    first = shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_by_fixture")
    second = shop.add("Make five five", b"line_5 = 1", b"line_5 = 5", "test_second")
    third = shop.add("Make twenty three", b"line_20 = 2", b"line_20 = 3", "TestThird::test_it")
    shop.project.build()
    last = {p.name: p.read_bytes() for p in (shop.project.store / "last").rglob("*.json")}

    found, _ = shop.ablate()
    assert list(found) == [first, second, third]
    assert {one["verdict"] for one in found.values()} == {"noticed"}
    assert found[first]["left_out_too"] == [third]  # its lines are those of the first
    assert found[second]["left_out_too"] == found[third]["left_out_too"] == []
    assert "RuntimeError: not patched" in found[first]["without_patch"]["message"]
    with_series, without = found[second]["with_series"], found[second]["without_patch"]
    assert (with_series["passed"], with_series["failed"]) == (2, 0)
    assert (without["passed"], without["failed"]) == (1, 1)
    assert "line_5 = 5" in without["message"]
    assert leftovers(shop.project) == []
    # what explain reads of the newest build is that of the whole series
    now = {p.name: p.read_bytes() for p in (shop.project.store / "last").rglob("*.json")}
    assert now == last


def test_tests_that_prove_nothing_are_told(shop: Shop) -> None:
    names = {
        test: shop.add(
            f"Make line {line} nine", b"line_%d = 1\n" % line, b"line_%d = 9\n" % line, test
        )
        for line, test in (
            (3, "test_blind"),
            (8, "test_wrong"),
            (13, "test_elsewhere"),
            (29, "test_that_builds"),
            (18, "test_nine"),
        )
    }
    found, err = shop.ablate(code=9)
    verdicts = {
        "test_blind": "not noticed",
        "test_wrong": "fails in any case",
        "test_elsewhere": "not run",
        "test_that_builds": "broken",
        "test_nine": "noticed",
    }
    assert {test: found[name]["verdict"] for test, name in names.items()} == verdicts
    for test, verdict in verdicts.items():
        told = [
            line for line in err.splitlines() if line.startswith("error: ") and f"::{test} " in line
        ]
        assert len(told) == (verdict != "noticed"), err
    assert "it proves nothing" in err
    assert leftovers(shop.project) == []


def test_the_only_patch_of_a_series(shop: Shop) -> None:
    name = shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_first")
    found, _ = shop.ablate()
    assert found[name]["verdict"] == "noticed"


def test_one_patch_by_name_as_a_table(shop: Shop) -> None:
    shop.add("Make three nine", b"line_3 = 1", b"line_3 = 9", "test_blind")
    name = shop.add("Make twenty two", b"line_20 = 1", b"line_20 = 2", "test_first")
    shop.project.run("pins", "record")
    stem = name.removesuffix(".patch")
    out, _ = shop.project.run("ablate", "--python", sys.executable, stem)
    row = next(line for line in out.splitlines() if line.lstrip().startswith(f"demo: {stem}"))
    assert row.split() == [
        "demo:",
        stem,
        "1",
        "passed",
        "1",
        "failed",
        "-",
        row.split()[-2],
        "noticed",
    ]
    assert "nine" not in out


def test_what_can_not_be_ablated_is_refused(shop: Shop) -> None:
    name = shop.add("Make three nine", b"line_3 = 1", b"line_3 = 9", "test_missing")
    python = ("--python", sys.executable)
    _, err = shop.project.run("ablate", *python, "no-such", code=2)
    assert "no-such.patch: no such patch" in err
    _, err = shop.project.run("ablate", *python, code=6)
    assert "did not run" in err
    assert "test_missing" in err
    _, err = shop.project.run("ablate", *python, code=2, SPARKFORGE_CHECKOUT=str(ROOT))
    assert "SPARKFORGE_CHECKOUT is set" in err
    patch = shop.project.patches / name
    patch.write_text(patch.read_text().replace("\nTest: ", "\nTested-by: "))
    _, err = shop.project.run("ablate", *python, code=6)
    assert f"{name}: has no test" in err


@pytest.mark.parametrize(
    ("whole", "without", "verdict"),
    [
        (Outcome(passed=2), Outcome(failed=2), "noticed"),
        (Outcome(passed=2), Outcome(passed=1, failed=1), "noticed"),
        (Outcome(passed=2, skipped=1), Outcome(skipped=2, failed=1), "noticed"),
        (Outcome(passed=2), Outcome(passed=2), "not noticed"),
        (Outcome(passed=2), Outcome(skipped=2), "not run"),
        (Outcome(passed=2), Outcome(), "not run"),
        (Outcome(skipped=2), Outcome(failed=2), "not run"),
        (Outcome(), Outcome(failed=2), "not run"),
        (Outcome(passed=1, failed=1), Outcome(failed=2), "fails in any case"),
        (Outcome(failed=1, ours=True), Outcome(failed=2), "broken"),
        (Outcome(passed=1), Outcome(failed=1, ours=True), "broken"),
    ],
)
def test_verdicts(whole: Outcome, without: Outcome, verdict: str) -> None:
    assert judge(whole, without) == verdict


@pytest.mark.parametrize(
    ("message", "text", "gist"),
    [
        ("AssertionError: 1 == 2\n  more", "E  KeyError: x", "AssertionError: 1 == 2"),
        ('failed on setup with "RuntimeError: not patched"', "", 'RuntimeError: not patched"'),
        ("AssertionError: \n  log", "E  a.MyError: none\nE  log\n", "a.MyError: none"),
        ("AssertionError: \n  log", "E  log", "AssertionError:"),
        ("", "", "no message"),
    ],
)
def test_gists(message: str, text: str, gist: str) -> None:
    failure = ET.Element("failure", message=message)
    failure.text = text
    assert _gist(failure) == gist
