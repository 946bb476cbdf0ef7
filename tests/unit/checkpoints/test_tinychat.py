"""The checkpoint that speaks Harmony: its script (tests/patches/test_chat.py has it served)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import pytest

from sparkforge.build import publish
from sparkforge.checkpoints import chat, tiny
from sparkforge.checkpoints.chat import Rule


def test_no_context_has_two_words_next() -> None:
    found: dict[bytes | str, list[Rule]] = defaultdict(list)
    for rule in chat.rules():
        found[rule.word].append(rule)
    assert len(found) > 40
    for word, rules in found.items():
        bits = list(dict.fromkeys(bit for one in rules for bit in (*one.given, *one.without)))
        for size in range(len(bits) + 1):
            for context in map(set, itertools.combinations(bits, size)):
                if len(context & {b"analysis", b"final", b"json"}) > 1:
                    continue  # one word is before another
                holding = [
                    one
                    for one in rules
                    if context.issuperset(one.given) and context.isdisjoint(one.without)
                ]
                assert len(holding) <= 1, (word, context)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not o200k_base: it has no token b'"):
        chat.make_chat_gpt_oss(tmp_path / "model", [b"a", b"b"])
    assert not (tmp_path / "model").exists()


def test_two_commands_that_want_the_tiny_checkpoint_at_once_both_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny-model"
    make = tiny.make_tiny_gpt_oss

    def slow(dest: Path) -> None:
        make(dest)  # the other command, meanwhile
        make(dest)

    monkeypatch.setattr(tiny, "make_tiny_gpt_oss", slow)
    assert publish.tiny_model(tmp_path) == model
    assert (model / "model.safetensors").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        publish.tiny_model(tmp_path / "file")
