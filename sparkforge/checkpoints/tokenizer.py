"""tokenizer.json of a byte-level BPE, for the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def byte_bpe(
    special: Mapping[int, str],
    vocabulary: Mapping[str, int],
    merges: Sequence[str],
    split: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of the file.

    Args:
        special: special tokens by their numbers.
        vocabulary: numbers of the other tokens, each written in ``byte_characters``.
        merges: pairs of tokens, the first ones first.
        split: pre-tokenizer that splits a text before its bytes; None: none.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    before = byte_level
    if split is not None:
        before = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def byte_characters() -> list[str]:
    """Return a byte-level tokenizer's printable character for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    moved = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + moved))
            moved += 1
    return characters
