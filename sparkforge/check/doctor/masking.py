"""Mask keys, passwords, and the names of machine and user in a text for other people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.serving.options import IN_URL, SECRET_NAME

INSTEAD = "***"
_LEAST = 3  # characters of a secret; to mask shorter ones would spoil every text
_PLAIN = {"true", "false", "none", "null", "yes", "off"}
_NAME = rf"[\w.-]*{SECRET_NAME}[\w.-]*"
_PATTERNS = (
    (re.compile(r"-----BEGIN ([A-Z ]+)-----(?:[^\"']*?-----END \1-----|[^\"']*)"), INSTEAD),
    (IN_URL, f"{INSTEAD}@"),
    (
        re.compile(
            r"\b(hf_|sk-|gh[pousr]_|github_pat_|nvapi-|glpat-|xox[abprs]-)[A-Za-z0-9_-]{16,}"
        ),
        rf"\1{INSTEAD}",
    ),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9+/=._~-]{6,}"), rf"\1 {INSTEAD}"),
    # a name and its value in quotes, which may be escaped: "name": "…", 'name': '…', name="…"
    (
        re.compile(rf"(?i)({_NAME}\\*[\"']?\s*[:=,]\s*)(\\*[\"'])(?:(?!\2)(?:\\.|[^\n]))*"),
        rf"\1\2{INSTEAD}",
    ),
    # name=…, name: …, and --name … with several values
    (re.compile(rf"(?i)({_NAME}\\*[\"']?\s*[:=]\s*)[^\s\"',}}\]\\]+"), rf"\1{INSTEAD}"),
    (re.compile(rf"(?i)(--{_NAME})(?:[ \t]+(?!-)[^\s\"'\\]+)+"), rf"\1 {INSTEAD}"),
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
    """Patterns to mask with their replacements, in addition to those that look like a secret."""

    own: tuple[tuple[str, str], ...] = ()

    def text(self, text: str) -> str:
        """Return a text with these masked."""
        for pattern, instead in self.own:
            text = re.sub(pattern, instead, text)
        for known, instead in _PATTERNS:
            text = known.sub(instead, text)
        return text

    def tree(self, value: Any) -> Any:
        """Return JSON values with all texts masked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        if isinstance(value, dict):
            return {
                self.text(key): INSTEAD
                if isinstance(item, str) and is_secret_name(key)
                else self.tree(item)
                for key, item in value.items()
            }
        return value


def mask_of(
    variables: Mapping[str, str], keys: Iterable[str], home: Path, user: str, host: str
) -> Mask:
    """Return the mask of a machine.

    Args:
        variables: of environment and .env; values of those with a secret's name are masked.
        keys: API keys from their files.
    """
    values = {value for name, value in variables.items() if is_secret_name(name)}
    secrets = {value.strip() for value in (*values, *keys)}
    # a path is not a secret: it names the file of one
    masked = [
        secret
        for secret in secrets
        if len(secret) >= _LEAST
        and secret.lower() not in _PLAIN
        and not secret.startswith(("/", "~", "."))
    ]
    # longest first: one may be part of another
    own = [
        (rf"(?<!\w){re.escape(one)}(?!\w)" if len(one) < 6 else re.escape(one), INSTEAD)
        for one in sorted(masked, key=len, reverse=True)
    ]
    names = ((str(home), "~"), (user, "USER"), (host, "HOST"), (host.partition(".")[0], "HOST"))
    own += [
        (rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead)
        for name, instead in names
        if len(name) > 1 and name != "root"
    ]
    return Mask(tuple(own))
