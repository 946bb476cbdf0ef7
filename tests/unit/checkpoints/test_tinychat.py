"""The checkpoint that speaks Harmony: its script (tests/patches/test_chat.py has it served)."""

import itertools
from collections import defaultdict

from sparkforge.checkpoints import chat
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
