"""The files of a virtual environment: whether they are still those that were installed.

An environment has 20,000 files of 2.6 GB. In every build their sizes and dates are compared with
those of the installation (0.1 s), and where something is made of it, every byte with the wheels'
own RECORDs.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparkforge.core.disk import write_file

_LISTING = "files.txt"
_WIDTH = 4  # hashing lets other threads run


def note(folder: Path) -> None:
    """Write down the size and date of each file below ``folder/venv``, without byte code."""
    paths = [
        os.path.join(top, name)  # noqa: PTH118 - 20,000 Paths take longer than all else here
        for top, folders, names in os.walk(folder / "venv")
        if not top.endswith("__pycache__")
        for name in [*names, *folders]
    ]
    above = len(f"{folder}/")
    lines = sorted(f"{_state(path)} {path[above:]}\n" for path in paths if _is_file(path))
    text = "".join(lines).encode(errors="surrogateescape")
    write_file(folder / _LISTING, f"{hashlib.sha256(text).hexdigest()}\n".encode() + text)


def changed(folder: Path) -> bool:
    """Return whether a file of ``note`` has gone or has another size or date; others may be new."""
    try:
        digest, _, text = (folder / _LISTING).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return True
        for line in text.decode(errors="surrogateescape").splitlines():
            size, date, name = line.split(" ", 2)
            if _state(f"{folder}/{name}") != f"{size} {date}":
                return True
    except FileNotFoundError:
        return True
    return False


def _is_file(path: str) -> bool:
    return os.path.islink(path) or not os.path.isdir(path)  # noqa: PTH112, PTH114 - as above


def _state(path: str) -> str:
    found = os.lstat(path)
    return f"{found.st_size} {found.st_mtime_ns}"


def damaged(folder: Path) -> list[str]:
    """Return the files below ``folder/venv`` whose bytes are not those of their wheels' RECORDs."""
    wrong: list[str] = []
    stated: list[tuple[Path, str]] = []
    records = sorted((folder / "venv").glob("lib/*/site-packages/*.dist-info/RECORD"))
    for record in records:
        try:
            stated += _stated(record)
        except (ValueError, csv.Error):  # not UTF-8, or no lines of a RECORD
            wrong.append(str(record))
    with ThreadPoolExecutor(_WIDTH) as pool:
        for (path, sha256), found in zip(stated, pool.map(_sha256, stated), strict=True):
            if found != sha256:
                wrong.append(str(path))
    return wrong if records else [str(folder / "venv")]


def _stated(record: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a RECORD that has a digest, with that."""
    for row in csv.reader(record.read_text(encoding="utf-8").splitlines(), strict=True):
        name, digest, _ = row
        if digest:
            yield record.parent.parent / name, digest


def _sha256(one: tuple[Path, str]) -> str:
    path, digest = one
    algorithm = digest.partition("=")[0]
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).digest()
    except (OSError, ValueError, binascii.Error):  # gone, or no algorithm
        return ""
    return f"{algorithm}={base64.urlsafe_b64encode(found).rstrip(b'=').decode()}"
