"""Commands on pages: build.py takes each, and a test runs it or a reason says why none does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest
import yaml

from sparkforge.cli import main
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_LIST = ROOT / "docs/commands.yaml"
_BLOCK = re.compile(r"^( *)```console\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_DOCUMENT = re.compile(r"(<<'(\w+)'\n).*?^ *\2$", re.MULTILINE | re.DOTALL)
_SHELL = set("|&;<>")
_COMPOSE = ("up", "down", "ps", "logs", "restart", "stop", "version")
_BUILD = ["python3", "build.py"]


def lines(page: Path) -> Iterator[list[str]]:
    """Return the words of each simple command in a page's blocks, comments left out.

    In a block with prompts ($) all else is output.
    """
    for indent, written in _BLOCK.findall(page.read_text()):
        block = re.sub(f"^{indent}", "", _DOCUMENT.sub(r"\1", written), flags=re.MULTILINE)
        prompts = re.search(r"^\$ ", block, re.MULTILINE) is not None
        for line in block.replace("\\\n", " ").splitlines():
            if prompts and not line.startswith("$ "):
                continue
            text = line.removeprefix("$ ") if prompts else line
            words = shlex.shlex(text.replace("2>&1", ""), posix=True, punctuation_chars="|&;<>")
            words.whitespace_split = True
            pieces = [(shell, list(some)) for shell, some in groupby(words, _is_shell)]
            for at, (shell, some) in enumerate(pieces):
                file = at > 0 and pieces[at - 1][1][-1:] in ([">"], [">>"], ["<<"])
                if not shell and not file:
                    yield some


def _is_shell(word: str) -> bool:
    return set(word) <= _SHELL


def commands(page: Path) -> Iterator[list[str]]:
    """Return the words behind `python3 build.py`."""
    for words in lines(page):
        for at in range(len(words) - 1):
            if words[at : at + 2] == _BUILD:
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
    # the name of an image says its target
    assert all("spark" in words or words[0] == "verify" for words in found)
    for words in lines(page):
        if words[:2] == ["docker", "compose"]:
            assert words[2] in _COMPOSE


def test_the_check_finds_what_is_wrong() -> None:
    with pytest.raises(Exception, match="unrecognized arguments: --untl"):
        takes(["--target", "cpu", "--untl", "wheels"])


# what follows ":" or "@" is a tag: the name is an image's
_PATH = re.compile(
    r"(?<![\w.-])(?:\.ci|benchmarks|docs|patches|requirements|scripts|sparkforge|tests)/[\w./-]+"
    r"(?![\w./:@-])"
)


def absent(words: list[str]) -> list[str]:
    """Return the paths of the checkout in a command that are not there."""
    return [path for word in words for path in _PATH.findall(word) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_in_a_pages_commands_are_there(page: Path) -> None:
    assert [path for words in lines(page) for path in absent(words)] == []


def test_a_path_that_is_gone_is_found() -> None:
    words = ["A=$PWD/sparkforge/none", "python3", "scripts/test.py", "tests/none.py", "../none/x"]
    assert absent([*words, "sparkforge/spark:0.31.0"]) == ["sparkforge/none", "tests/none.py"]


# -- docs/commands.yaml ---------------------------------------------------------------------------


@dataclass
class Listed:
    """docs/commands.yaml. State: the keys that a command had."""

    why: Mapping[tuple[str, ...], str]
    """By the words that a command begins with, what runs it or why nothing does."""
    run: tuple[tuple[str, ...], ...]
    """Commands that this file runs."""
    tests: frozenset[str]
    """Tests that run the others."""
    used: set[tuple[str, ...]] = field(default_factory=set)

    @classmethod
    def load(cls) -> Listed:
        """Read it; a key that is there twice is an error."""
        data = yaml.safe_load(_LIST.read_text())
        run = tuple(_key(text) for text in data["run"])
        why = [(key, "run here") for key in run]
        why += [(_key(text), test) for text, test in data["tested"].items()]
        why += [(_key(text), reason) for reason, keys in data["not run"].items() for text in keys]
        found = dict(why)
        assert len(found) == len(why), "a key is there twice"
        return cls(found, run, frozenset(data["tested"].values()))

    def reason(self, words: list[str]) -> str | None:
        """Return what runs a command, or why nothing does; None: it is not listed."""
        for length in range(len(words), 0, -1):
            key = tuple(words[:length])
            if key in self.why and (self.why[key] != "run here" or length == len(words)):
                self.used.add(key)
                return self.why[key]
        return None


def _key(text: str) -> tuple[str, ...]:
    words = shlex.split(text)
    return (*_BUILD, *words[1:]) if words[0] == "build.py" else tuple(words)


def test_every_command_is_run_by_a_test_or_has_a_reason() -> None:
    listed = Listed.load()
    missing = [
        f"{page.name}: {shlex.join(words)}"
        for page in PAGES
        for words in lines(page)
        if listed.reason(words) is None
    ]
    assert not missing, f"add to {_LIST.name}: {missing}"
    unused = [" ".join(key) for key in listed.why.keys() - listed.used]
    assert not unused, f"no page has these any more: {unused}"


def test_the_named_tests_are_there() -> None:
    for name in Listed.load().tests:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text()
        assert not function or f"def {function}(" in text, name


@pytest.mark.parametrize("words", Listed.load().run, ids=" ".join)
def test_what_needs_nothing_is_run(words: tuple[str, ...], isolated: Path) -> None:
    program, *rest = words
    assert program == "python3"
    done = subprocess.run(
        [sys.executable, *rest], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


_SCRIPTS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_scripts_of_pages_are_read_by_a_shell() -> None:
    found = [script for page in PAGES for script in _SCRIPTS.findall(page.read_text())]
    assert found
    for script in found:
        read = subprocess.run(
            ["sh", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert read.returncode == 0, read.stderr
