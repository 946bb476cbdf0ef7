"""Every `build.py` command that a page shows is one that build.py takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from sparkforge.cli import main
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = set("|&;<>")
_COMPOSE = ("up", "down", "ps", "logs", "restart", "stop", "version")


def lines(page: Path) -> Iterator[list[str]]:
    """Return the words of each simple command in a page's blocks, comments left out."""
    for block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.shlex(line.replace("2>&1", ""), posix=True, punctuation_chars="|&;<>")
            words.whitespace_split = True
            try:
                every = list(words)
            except ValueError:  # output that a page shows, or a string of several lines
                continue
            for shell, some in groupby(every, lambda word: set(word) <= _SHELL):
                if not shell:
                    yield list(some)


def commands(page: Path) -> Iterator[list[str]]:
    """Return the words behind `python3 build.py`."""
    for words in lines(page):
        for at in range(len(words) - 1):
            if words[at : at + 2] == ["python3", "build.py"]:
                yield words[at + 2 :]


def takes(words: list[str]) -> None:
    """Parse words as build.py does; what is wrong is an error of its own."""
    words = words[: words.index("--")] if "--" in words else words
    main._parser().parse_args(main.spelled_out(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_taken(page: Path) -> None:
    for words in commands(page):
        try:
            takes(words)
        except Exception as error:
            raise AssertionError(f"{page.name}: build.py {shlex.join(words)}: {error}") from error


def test_the_first_run_is_all_commands_that_are_known() -> None:
    page = ROOT / "docs/first-run.md"
    found = list(commands(page))
    named = {words[0] if not words[0].startswith("-") else "build" for words in found}
    assert named >= {"doctor", "build", "images", "rollback"}
    assert all("spark" in words for words in found)
    for words in lines(page):
        if words[:2] == ["docker", "compose"]:
            assert words[2] in _COMPOSE


def test_the_check_finds_what_is_wrong() -> None:
    with pytest.raises(Exception, match="unrecognized arguments: --untl"):
        takes(["--target", "cpu", "--untl", "wheels"])
