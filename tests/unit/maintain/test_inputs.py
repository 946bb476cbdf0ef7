"""Lists of requirements that follow the wheels which they copy."""

from packaging.requirements import Requirement

from sparkforge.maintain import companions

LIST = """\
# What demo declares, without vision.
regex
gone
lib<2,>=1.4
torch==2.13.0+cpu  # the CPU build
marked==1.0; platform_machine == "x86_64"
marked
setuptools>=78.1.1,<81.0.0
"""
OLD = """\
regex
gone
lib>=1.4,<2
torch==2.13.0+cpu
marked==1.0; platform_machine == "x86_64"
marked
vision==1.0
setuptools==77.0.3
"""
NEW = """\
regex
lib>=1.6,<3
torch==2.14.0+cpu
marked==2.0; platform_machine == "x86_64"
marked
vision==2.0
setuptools==79.0
fresh>=1
"""
# vision is left out, and setuptools is a line of ours
FOLLOWED = """\
# What demo declares, without vision.
regex
lib<3,>=1.6
torch==2.14.0+cpu
marked==2.0; platform_machine == "x86_64"
marked
setuptools>=78.1.1,<81.0.0
fresh>=1
"""


def test_a_list_follows_its_wheel_and_what_is_ours_stays() -> None:
    old, new = ([Requirement(one) for one in text.splitlines()] for text in (OLD, NEW))
    assert companions.follow(LIST, old, old, {}) == LIST
    assert companions.follow(LIST, old, new, {}) == FOLLOWED


def test_pins_of_other_lists_follow() -> None:
    moved = {"torch": ("2.13.0", "2.14.0"), "hub": ("1.33.0", "2.0")}
    text = "torch==2.13.0\nhub==1.33.0  # as served\ntorch==2.13.0+cpu\n"
    followed = companions.follow(text, [], [], moved)
    assert followed == "torch==2.14.0\nhub==2.0  # as served\ntorch==2.13.0+cpu\n"
