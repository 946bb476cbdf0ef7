"""Lists of requirements that follow the wheels which they copy."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from sparkforge.maintain import companions

LIST = """\
# What demo 0.31.0 declares (0.31.0's wheel; not 10.31.0), without vision.
regex
lib<2,>=1.4
torch==2.13.0+cpu  # the CPU build
marked==1.0; platform_machine == "x86_64"
marked
setuptools>=78.1.1,<81.0.0
"""
OLD = [
    "regex",
    "lib>=1.4,<2",
    "torch==2.13.0+cpu",
    'marked==1.0; platform_machine == "x86_64"',
    "marked",
    "vision==1.0",
    "setuptools==77.0.3",
]


def follow(change: tuple[str, str]) -> str:
    """Follow a wheel with a declaration replaced; "" for none."""
    before, to = change
    texts = [to if one == before else one for one in (OLD if before else [*OLD, ""])]
    old, new = ([Requirement(one) for one in some if one] for some in (OLD, texts))
    return companions.follow(LIST, old, new, ["audio"])


@pytest.mark.parametrize(
    ("change", "old", "new"),
    [
        (("lib>=1.4,<2", "lib>=1.6,<3"), "lib<2,>=1.4\n", "lib<3,>=1.6\n"),
        (
            ("torch==2.13.0+cpu", "torch==2.14.0+cpu"),
            "torch==2.13.0+cpu  # the CPU build",
            "torch==2.14.0+cpu",
        ),
        (
            (
                'marked==1.0; platform_machine == "x86_64"',
                'marked==2.0; platform_machine == "x86_64"',
            ),
            "marked==1.0;",
            "marked==2.0;",
        ),
        (("regex", ""), "regex\n", ""),
        (("", "fresh>=1"), "marked\n", "marked\nfresh>=1\n"),
    ],
    ids=["range", "local version", "marker", "gone", "new"],
)
def test_a_line_follows(change: tuple[str, str], old: str, new: str) -> None:
    assert follow(change) == LIST.replace(old, new, 1)


@pytest.mark.parametrize(
    "change",
    [
        ("vision==1.0", "vision==2.0"),  # left out
        ("", "audio==1.0"),  # a target leaves it out
        ("setuptools==77.0.3", "setuptools==79.0"),  # a line of ours
    ],
)
def test_what_is_ours_stays(change: tuple[str, str]) -> None:
    assert follow(change) == LIST


def test_pins_of_other_lists_follow() -> None:
    moved = {"torch": ("2.13.0", "2.14.0"), "hub": ("1.33.0", "2.0")}
    followed = companions.pinned_anew(
        "torch==2.13.0\nhub==1.33.0  # as served\ntorch==2.13.0+cpu\n", moved
    )
    assert followed == "torch==2.14.0\nhub==2.0  # as served\ntorch==2.13.0+cpu\n"
