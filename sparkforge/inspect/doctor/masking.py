"""Mask keys, passwords, and the names of machine and user in a text for other people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.serving.access import IN_URL, SECRET_NAME

INSTEAD = "***"
_LEAST = 6  # characters of a secret: to mask "true" would spoil every text
_PATTERNS = (
    (IN_URL, f"{INSTEAD}@"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[A-Za-z0-9_-]{16,}"), rf"\1{INSTEAD}"),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9+/=._~-]{6,}"), rf"\1 {INSTEAD}"),
    # NAME=value and "name": "value", for names of secrets
    (
        re.compile(
            rf"(?i)([A-Z0-9_-]*{SECRET_NAME}[A-Z0-9_-]*"
            r"(?:\"\s*:\s*\"|=))[^\s\"',}\]]+"
        ),
        rf"\1{INSTEAD}",
    ),
    # serial numbers of this device
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"), f"GPU-{INSTEAD}"),
    (re.compile(r"(<(serial|board_id|uuid|pdi)>)[^<]*"), rf"\1{INSTEAD}"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I), "xx:xx:xx:xx:xx:xx"),
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable's name is that of a secret."""
    return re.search(SECRET_NAME, name, re.I) is not None


@dataclass(frozen=True)
class Mask:
    """Texts to mask, in addition to those that look like a secret."""

    secrets: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    """Replacements by name: home folder, user, host."""

    def text(self, text: str) -> str:
        """Return a text with these masked."""
        for secret in self.secrets:
            text = text.replace(secret, INSTEAD)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        for name, instead in self.names:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
        return text


def mask_of(
    variables: Mapping[str, str], keys: Iterable[str], home: Path, user: str, host: str
) -> Mask:
    """Return the mask of a machine.

    Args:
        variables: of environment and .env; values of secrets are masked.
        keys: API keys from their files.
    """
    values = [value for name, value in variables.items() if is_secret_name(name)]
    found = {value.strip() for value in (*values, *keys)}
    # longest first: one may be part of another. A path is not a secret: it names the key's file
    secrets = sorted(
        (
            secret
            for secret in found
            if len(secret) >= _LEAST and not secret.startswith(("/", "~", "."))
        ),
        key=len,
        reverse=True,
    )
    names = [(str(home), "~"), (user, "USER"), (host, "HOST"), (host.partition(".")[0], "HOST")]
    return Mask(
        tuple(secrets),
        tuple((name, instead) for name, instead in names if len(name) > 1 and name != "root"),
    )
