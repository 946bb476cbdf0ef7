"""The installed files of an image, checked by the RECORDs of their distributions and by wheels."""

from __future__ import annotations

import base64
import csv
import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from sparkforge.build.context import Context
from sparkforge.build.image import VENV
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import CheckError
from sparkforge.sources.wheelhouse import read_lock

Records = Mapping[str, Mapping[str, str]]
"""Paths with their sha256 ("" if not stated) by distribution: its .dist-info folder."""


class File(NamedTuple):
    """A file of an image.

    Attributes:
        sha256: of a link ``link to`` and its target, which is the hash of no file.
        data: its bytes, if they were kept.
    """

    sha256: str
    data: bytes | None = None


@contextmanager
def as_written(what: str) -> Iterator[None]:
    """Turn errors about the contents of a document in an image into one CheckError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        msg = f"{what}: not in the form that a build writes: {type(error).__name__}: {error}"
        raise CheckError(msg, "build the image again") from None


def site_of(python: str) -> str:
    """Return the folder of packages in our images for a Python such as 3.11, with a last slash."""
    return f"{VENV}/lib/python{python}/site-packages/"


def name_of(folder: str) -> str:
    """Return a distribution's name in a lock's form, from its .dist-info folder."""
    stem = folder.removesuffix(".dist-info").rpartition("-")[0]
    return re.sub(r"[-_.]+", "-", stem).lower()


def records(files: Mapping[str, File], site: str) -> Records:
    """Return the RECORDs of the distributions in a folder of packages."""
    result = {}
    for name, file in files.items():
        below = name.removeprefix(site)
        # one level down: vendored packages (in setuptools) are files, not installed
        if file.data is not None and name != below and re.fullmatch(r"[^/]+/RECORD", below):
            with as_written(name):
                result[below.rpartition("/")[0]] = _rows(file.data, site)
    return result


def _rows(record: bytes, site: str) -> dict[str, str]:
    """Return the paths of a RECORD below the root, with their sha256 in hex."""
    rows = [row for row in csv.reader(record.decode().splitlines()) if row]
    return {posixpath.normpath(f"/{site}/{row[0]}").lstrip("/"): _hex(row[1]) for row in rows}


def _hex(stated: str) -> str:
    kind, _, value = stated.partition("=")
    if kind != "sha256":
        return ""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def _byte_code(path: str) -> bool:
    """Return whether Python uses a file with its source only, which is checked."""
    return re.search(r"/__pycache__/[^/]+\.pyc$", path) is not None


def check(files: Mapping[str, File], of: Records, context: Context) -> tuple[int, list[str]]:
    """Compare every file of the environment with the RECORDs, or if it differs with the wheel.

    Returns:
        The number of compared files, and one line for each problem.
    """
    site = site_of(context.target.python)
    stated: dict[str, dict[str, str]] = {}
    for folder, rows in of.items():
        for path, sha256 in rows.items():
            stated.setdefault(path, {})[folder] = sha256
    count, problems = 0, []
    for path, hashes in stated.items():
        # a wheel's byte code is compiled again, with the hash of its source; a RECORD has no hash
        # of itself, and may lack others of its own folder
        if _byte_code(path) or (not all(hashes.values()) and ".dist-info/" in path):
            continue
        count += 1
        folder, file = next(iter(hashes)), files.get(path)
        if file is None:
            problems.append(f"{path}: missing, but {folder}/RECORD lists it")
        # two packages may have it; the later one's stays
        elif file.sha256 not in hashes.values():
            true = _in_the_wheel(context, folder, path.removeprefix(site))
            if true != file.sha256:
                hint = f"build.py --target {context.target_name} --until wheelhouse"
                more = "" if true else f"; to compare with the wheel: {hint}"
                problems.append(f"{path}: differs from {folder}/RECORD{more}")
    own = _of_the_venv(context.target.python)
    problems += [
        f"{path}: differs from what the Dockerfile writes"
        for path, sha256 in own.items()
        if path not in files or files[path].sha256 != sha256
    ]
    for path in files:
        if site.startswith(f"{path}/"):
            problems.append(f"{path}: must be a folder, of the environment")
        elif path.startswith(f"{VENV}/") and not (
            path in stated or path in own or _byte_code(path)
        ):
            problems.append(f"{path}: in no distribution's RECORD")
    return count, problems


def _of_the_venv(python: str) -> dict[str, str]:
    """Return the hashes of the environment's files that are in no distribution."""
    settings = hashlib.sha256(b"home = /usr/bin\ninclude-system-site-packages = false\n")
    links = {"python": f"/usr/bin/python{python}", f"python{python}": "python", "python3": "python"}
    found = {f"{VENV}/bin/{name}": f"link to {target}" for name, target in links.items()}
    return {**found, f"{VENV}/lib64": "link to lib", f"{VENV}/pyvenv.cfg": settings.hexdigest()}


def _in_the_wheel(context: Context, folder: str, member: str) -> str | None:
    """Return the sha256 of a file in the locked wheel; None: not in the store.

    Some wheels have another wheel's RECORD (PyNvVideoCodec 2.0.4 for arm64). Their installed files
    are correct anyway, as the wheel's hash in the lock proves.
    """
    for item in read_lock(context.lock):
        for sha256 in item.sha256s if item.name == name_of(folder) else ():
            downloads = context.store.download_path(sha256, "")
            for wheel in sorted(downloads.iterdir()) if downloads.is_dir() else ():
                if context.store.verified(sha256, wheel.name):
                    with ZipFile(wheel) as opened:
                        # for another platform or Python if it has no such file
                        if {member, f"{folder}/RECORD"} <= set(opened.namelist()):
                            return hashlib.sha256(opened.read(member)).hexdigest()
    return None


def against_wheel(wheel: Path, sha256: str, of: Records, site: str) -> list[str]:
    """Compare an installed wheel of ours with the wheel; one line for each problem.

    Args:
        sha256: of the wheel that the image states.
    """
    if sha256_file(wheel) != sha256:
        return [f"{wheel.name}: differs from the wheel in {wheel.parent}"]
    with ZipFile(wheel) as opened:
        record = next(n for n in opened.namelist() if n.endswith(".dist-info/RECORD"))
        rows = _rows(opened.read(record), site)
    there = of.get(record.rpartition("/")[0], {})
    return [
        f"{name}: differs from the wheel in {wheel.parent}"
        for name, stated in rows.items()
        # installers move the members of .data/, and compile byte code again
        if stated and ".data/" not in name and not _byte_code(name) and there.get(name) != stated
    ]
