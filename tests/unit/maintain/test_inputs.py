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
    'tool==1.0; extra == "more"',
]


def follow(*changes: tuple[str, str], without: str = "") -> str:
    """Follow a wheel with some declarations replaced; "" for none."""
    texts = list(OLD)
    for before, to in changes:
        texts = [to if one == before else one for one in texts] if before else [*texts, to]
    old, new = ([Requirement(one) for one in some if one] for some in (OLD, texts))
    kept, moved = (
        [one for one in some if "extra ==" not in str(one.marker)] for some in (old, new)
    )
    return companions.follow(LIST, kept, moved, without.split())


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
    [("vision==1.0", "vision==2.0"), ('tool==1.0; extra == "more"', 'tool==2.0; extra == "more"')],
)
def test_what_was_left_out_stays_out(change: tuple[str, str]) -> None:
    assert follow(change) == LIST


def test_what_a_target_leaves_out_is_not_added() -> None:
    assert follow(("", "audio==1.0"), without="audio") == LIST


def test_a_line_of_ours_is_not_touched() -> None:
    assert follow(("setuptools==77.0.3", "setuptools==79.0")) == LIST


def test_pins_of_other_lists_follow() -> None:
    moved = {"torch": ("2.13.0", "2.14.0"), "hub": ("1.33.0", "2.0")}
    followed = companions.pinned_anew(
        "torch==2.13.0\nhub==1.33.0  # as served\ntorch==2.13.0+cpu\n", moved
    )
    assert followed == "torch==2.14.0\nhub==2.0  # as served\ntorch==2.13.0+cpu\n"


def test_comments_name_the_new_release() -> None:
    text = companions.renamed(LIST, "0.31.0", "0.32.0")
    first = "# What demo 0.32.0 declares (0.32.0's wheel; not 10.31.0), without vision."
    assert text == LIST.replace(LIST.splitlines()[0], first)
