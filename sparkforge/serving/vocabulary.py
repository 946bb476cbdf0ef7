"""Is the Harmony vocabulary that vLLM's chat endpoint will use the pinned one?

oss-harmony 0.0.11, which our locks have, carries the vocabulary in its extension and needs no
download (found by running it without a network). The variable TIKTOKEN_ENCODINGS_BASE overrides
that with a file, and a wrong file would show at the first chat request only: as status 500.
"""

from __future__ import annotations

import base64
import hashlib

from sparkforge.serving.errors import StartError

# Ranks of o200k_base; special tokens come after them and are no part of the file.
RANKS = 199_998


class VocabularyError(StartError):
    """It cannot be loaded or is another one; the message says what to do."""


def tokens() -> list[bytes]:
    """Return the bytes of each token by its rank, special tokens left out.

    Raises:
        VocabularyError: it cannot be loaded.
    """
    try:
        from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding
    except ImportError as error:
        msg = f"the package oss-harmony is not there: {error}"
        raise VocabularyError(msg) from error
    try:
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        return [encoding._inner.decode_bytes([rank]) for rank in range(RANKS)]
    except HarmonyError as error:
        msg = (
            f"the Harmony vocabulary cannot be loaded: {error}; unset TIKTOKEN_ENCODINGS_BASE to"
            " use the one that the package carries, or correct the file there"
        )
        raise VocabularyError(msg) from error


def text() -> bytes:
    """Return the vocabulary as the file o200k_base.tiktoken has it.

    One line a token: its bytes in base64, a blank, its rank.

    Raises:
        VocabularyError: it cannot be loaded.
    """
    lines = (b"%s %d\n" % (base64.b64encode(one), rank) for rank, one in enumerate(tokens()))
    return b"".join(lines)


def digest() -> str:
    """Return the sha256 of `text`; raises what that does."""
    return hashlib.sha256(text()).hexdigest()


def check(sha256: str) -> None:
    """Compare with the pinned sha256 (64 hex digits).

    Raises:
        VocabularyError: it is another vocabulary, or none.
    """
    found = digest()
    if found != sha256:
        msg = f"the Harmony vocabulary has sha256 {found}, and pins.yaml says {sha256}"
        raise VocabularyError(msg)
