"""Check that the files of a virtual environment are still those that were installed.

An environment has 35,000 files of 2.6 GB. In every build their sizes and dates are compared with
those of the installation (0.1 s), and before something is made of it, every byte with the
wheels' own RECORDs.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparkforge.core.disk import read_json, write_file

_LISTING = "files.json"
_WIDTH = 4  # hashing lets other threads run


def note(folder: Path, published: Mapping[str, Sequence[str]]) -> None:
    """Write down the size and date of each file below ``folder/venv``, without byte code.

    Args:
        published: result of ``as_published``.
    """
    files: dict[str, list[str]] = {}
    for top, folders, names in os.walk(folder / "venv"):
        links = [name for name in folders if os.path.islink(f"{top}/{name}")]  # noqa: PTH114
        if (names or links) and not top.endswith("__pycache__"):
            files[os.path.relpath(top, folder)] = [*names, *links]
    document = {"files": files, "state": _state(folder, files), "published": published}
    write_file(folder / _LISTING, json.dumps(document).encode())


def changed(folder: Path) -> bool:
    """Return whether a file of ``note`` has gone or has another size or date; others may be new."""
    match read_json(folder / _LISTING):
        case {"files": dict(files), "state": str(state)}:
            try:
                return _state(folder, files) != state
            except (FileNotFoundError, NotADirectoryError):
                return True
    return True


def _state(folder: Path, files: Mapping[str, Sequence[str]]) -> str:
    """Return a digest of the names, sizes and dates of files, which are given by folder."""
    lines: list[str] = []
    for top, names in files.items():
        # names in an open folder are looked up in two thirds of the time that whole paths take
        at = os.open(f"{folder}/{top}", os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                found = os.lstat(name, dir_fd=at)
                lines.append(f"{top}/{name} {found.st_size} {found.st_mtime_ns}\n")
        finally:
            os.close(at)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def damaged(folder: Path) -> list[str]:
    """Return the files below ``folder/venv`` whose bytes are not those of their wheels.

    The wheels' RECORDs state them, and ``note`` where a RECORD is wrong. A file that two wheels
    have may be either's: build_backend.py is in FlashInfer's and in torch-c-dlpack-ext's.
    """
    listing = read_json(folder / _LISTING)
    published = listing.get("published", {}) if isinstance(listing, dict) else {}
    wrong: list[str] = []
    stated: dict[Path, list[list[str]]] = {}
    records = sorted((folder / "venv").glob("lib/*/site-packages/*.dist-info/RECORD"))
    for record in records:
        try:
            for path, *row in _stated(record):
                stated.setdefault(path, []).append(row)
        except (ValueError, csv.Error):  # not UTF-8, or no lines of a RECORD
            wrong.append(str(record))
    with ThreadPoolExecutor(_WIDTH) as pool:
        first = [(path, *rows[0]) for path, rows in stated.items()]
        for (path, rows), found in zip(stated.items(), pool.map(_found, first), strict=True):
            if found not in (*rows, published.get(str(path.relative_to(folder)))):
                wrong.append(str(path))
    return wrong if records else [str(folder / "venv")]


def as_published(
    paths: Iterable[str], folder: Path, wheels: Iterable[Path]
) -> dict[str, list[str]]:
    """Return digest and size of each file that is as in a wheel, by its path below ``folder``.

    The RECORD of a published wheel can be wrong: two libraries of pynvvideocodec 2.0.4 were changed
    after it was written.

    Args:
        paths: files in a site-packages folder below ``folder``.
        wheels: third-party ones that are installed; their hashes were checked.
    """
    sites = [path.partition("site-packages/") for path in paths]
    members = {name: Path(before + between) for before, between, name in sites}
    found = {}
    for wheel in wheels if members else ():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            record = next((name for name in names if name.endswith(".dist-info/RECORD")), "")
            for name in members.keys() & names - {record}:
                path, installed = members[name] / name, members[name] / record
                there = path.is_file() and installed.is_file()
                same = there and path.read_bytes() == archive.read(name)
                if same and _row(installed.read_bytes(), name) == _row(archive.read(record), name):
                    found[os.path.relpath(path, folder)] = _found((path, "sha256", "any"))
    return found


def _row(record: bytes, name: str) -> list[str] | None:
    """Return a file's row in a RECORD."""
    rows = csv.reader(record.decode(errors="replace").splitlines())
    return next((row for row in rows if row[:1] == [name]), None)


def _stated(record: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield each file of a RECORD that has a digest, with digest and size.

    A RECORD has no digest of itself: these two and its own row leave no part of it unchecked.
    """
    rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines(), strict=True))
    if [f"{record.parent.name}/RECORD", "", ""] not in rows:
        raise ValueError(f"{record} does not list itself")
    for name, digest, size in rows:
        if digest:
            yield record.parent.parent / name, digest, size


def _found(entry: tuple[Path, str, str]) -> list[str]:
    """Return digest and size of a file, as its RECORD states them; [] where there are none."""
    path, digest, stated = entry
    algorithm = digest.partition("=")[0]
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).digest()
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, binascii.Error):  # gone, or no algorithm
        return []
    text = base64.urlsafe_b64encode(found).rstrip(b"=").decode()
    return [f"{algorithm}={text}", stated and str(size)]
