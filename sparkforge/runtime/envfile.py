""".env: read as Compose reads it, and written so that the user's own lines stay."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path

from sparkforge.core.disk import write_file


def read(path: Path) -> dict[str, str]:
    """Return the variables of a .env; {} if it is missing.

    python-dotenv has Compose's rules, except three that are not needed here (tested with Compose
    2.26): ``$NAME`` without braces, ``${NAME:+word}`` and ``NAME: value`` are not supported.
    """
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # not needed by a build in which nothing changed

    text = path.read_text(encoding="utf-8", errors="replace")
    return {name: value or "" for name, value in dotenv_values(stream=io.StringIO(text)).items()}


def seen(path: Path) -> dict[str, str]:
    """Return Compose's variables: the environment, and others of .env."""
    return {**read(path), **os.environ}


def put(path: Path, ours: Mapping[str, str]) -> None:
    """Set variables in a .env, atomically.

    All other lines stay unchanged. An empty value removes the line of its variable.
    """
    path = path.resolve()  # the target of a link
    kept, before = [], None
    if path.exists():
        before = path.read_text(errors="surrogateescape")
        kept = [line for line in before.splitlines() if _name(line) not in ours]
    text = [f"{name}={quoted(value)}" for name, value in ours.items() if value]
    after = "\n".join([*kept, *text]) + "\n"
    if after != before:
        write_file(path, after.encode(errors="surrogateescape"))


def _name(line: str) -> str:
    return line.partition("=")[0].strip().removeprefix("export ").strip()


def quoted(value: str) -> str:
    """Return a value escaped for .env, where ``$``, ``#`` and quotes are special in Compose."""
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return "'" + value.replace("'", "\\'") + "'"
