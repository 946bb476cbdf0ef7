"""The sha256 of inputs, of files and of code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_READ: dict[tuple[int, ...], str] = {}
"""The sha256 of this run's files, by device, inode, size, mtime and ctime."""


def key_of(inputs: Mapping[str, Any]) -> str:
    """Return the sha256 of the inputs in canonical JSON."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the sha256 of files by their names."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def intact(path: Path, sha256: str) -> bool:
    """Return whether a file exists with its recorded bytes.

    One run reads a file, under all its names, again only if the operating system reports a change.
    """
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    if state not in _READ:
        _READ[state] = sha256_file(path)
    return _READ[state] == sha256


def code_digest(*files: Path) -> str:
    """Return one digest of files that affect an artefact; of modules: ``store.code_of``."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.name):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
