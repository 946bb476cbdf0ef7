"""Long text in Harmony chats: the tokens of oss-harmony, in linear time and beside the event loop.

test_chat.py has a server that answers others meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.patches.probing import run_module

COUNT = 600


@pytest.fixture(scope="module")
def answers(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("harmony")
    out = folder / "answers.json"
    run_module(patched_python, "probe_harmony_text", str(COUNT), out, folder=folder)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_tokens_are_those_of_oss_harmony(answers: dict[str, Any]) -> None:
    assert answers["wrong"] == []
    assert answers["rendered"] == COUNT


def test_oss_harmony_sees_no_long_piece(answers: dict[str, Any]) -> None:
    """Its time grows with the square of a piece's length, and this bounds the length."""
    for place, (longest, size, whole) in answers["unbroken"].items():
        assert longest < 600, place  # 128 of the text, each escaped at most, and the JSON around
        if place.startswith(("user", "instructions", "result")):
            assert size < 600, place
        assert whole, place


def test_what_cannot_be_encoded_is_refused_in_words(answers: dict[str, Any]) -> None:
    said = answers["refused"]
    assert "blank characters in a row" in said["blank"]
    assert "more than 1048576 tokens" in said["many tokens"]
    assert "descriptions and schemas of the tools" in said["schema"]
    assert "too many numerals" in said["numerals"]
    assert said["nearly as blank"] == said["numerals as text"] == "rendered"
    # as before: refused by oss-harmony
    assert said["surrogate"] is said["surrogate in a schema"] is True


def test_long_conversations_wait_for_each_other_only(answers: dict[str, Any]) -> None:
    threads = {size: names for size, (names, rendered) in answers["threads"].items() if rendered}
    assert threads["100"] == []  # oss-harmony's own way, in the loop
    (shared,) = threads["3000"]
    (own,) = threads["300000"]
    assert shared.startswith("asyncio_")
    assert own.startswith("harmony_long_text")
