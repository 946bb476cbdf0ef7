"""Check that the Harmony vocabulary of vLLM's chat endpoint is the pinned one.

oss-harmony 0.0.11, the version in our locks, has the vocabulary in its extension and needs no
download (tested without a network). The variable TIKTOKEN_ENCODINGS_BASE replaces it with a file.
A wrong file would only show at the first chat request, as status 500.
"""

from __future__ import annotations

import base64
import hashlib

from sparkforge.serving.errors import StartError

# Ranks of o200k_base; special tokens follow and are not part of the file.
RANKS = 199_998


class VocabularyError(StartError):
    """The vocabulary cannot be loaded, or is another one; the message has a hint."""


def tokens() -> list[bytes]:
    """Return the bytes of each token by its rank, without special tokens."""
    try:
        from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
    except ImportError as error:
        raise VocabularyError(f"the package oss-harmony is missing: {error}") from error
    try:
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        return [encoding._inner.decode_bytes([rank]) for rank in range(RANKS)]
    except HarmonyError as error:
        msg = (
            f"the Harmony vocabulary cannot be loaded: {error}; unset TIKTOKEN_ENCODINGS_BASE to"
            " use the one in the package, or correct the file there"
        )
        raise VocabularyError(msg) from error


def text() -> bytes:
    """Return the vocabulary in the format of o200k_base.tiktoken.

    One line for each token: its bytes in base64, a space, its rank.
    """
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens()))
    return b"".join(lines)


def digest() -> str:
    """Return the sha256 of ``text()``, and raise its errors."""
    return hashlib.sha256(text()).hexdigest()


def check(sha256: str) -> None:
    """Compare with the pinned sha256 (64 hex digits)."""
    found = digest()
    if found != sha256:
        msg = f"the Harmony vocabulary has sha256 {found}, and pins.yaml says {sha256}"
        raise VocabularyError(msg)
