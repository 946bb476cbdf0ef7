"""The tokenizer of o200k_harmony: special tokens, the split of text, the file."""

from __future__ import annotations

from typing import Any

from sparkforge.checkpoints.tokenizer import byte_bpe, byte_characters

VOCAB_SIZE = 201_088
SPECIAL_TOKENS = {
    "<|startoftext|>": 199_998,
    "<|endoftext|>": 199_999,
    "<|return|>": 200_002,
    "<|constrain|>": 200_003,
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|call|>": 200_012,
    "<|endofprompt|>": 200_018,
}
"""Of o200k_harmony; the other numbers from 200,000 on are reserved ones."""
# o200k_base's split of text.
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SPLIT = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def tokenizer(ranks: dict[bytes, int]) -> dict[str, Any]:
    """Return tokenizer.json: a byte-level BPE with the vocabulary's merges.

    A token's rank is also the place of its merges: all pairs of tokens that make it. Earlier merges
    decide which of them occurs.
    """
    characters = byte_characters()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [f"{written[a]} {written[b]}" for *_, a, b in sorted(known)]
    names = {number: name for name, number in SPECIAL_TOKENS.items()}
    special = {
        number: names.get(number, f"<|reserved_{number}|>")
        for number in range(len(ranks), VOCAB_SIZE)
    }
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    return byte_bpe(special, vocabulary, merges, split)
