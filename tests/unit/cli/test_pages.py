"""The command line accepts every ``build.py`` line of a page's console blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from sparkforge.cli import main
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\bpython3 build\.py\b(.*)")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words behind ``python3 build.py``, without those behind ``--``."""
    for block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if found := _COMMAND.search(line):
                text = found[1].replace("2>&1", "")
                lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
                lexer.whitespace_split = True
                yield list(takewhile(lambda word: word[0] not in "|&;<>()" and word != "--", lexer))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_parse(page: Path) -> None:
    for words in commands(page):
        main.parsed(words)
