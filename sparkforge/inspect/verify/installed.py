"""The installed files of an image, checked by the RECORDs of their distributions."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZipFile

from sparkforge.build.image import VENV
from sparkforge.core.errors import VerifyError
from sparkforge.inspect.verify.ociarchive import Entry
from sparkforge.sources.wheelhouse import Locked
from sparkforge.store.store import Store


@dataclass
class Report:
    """Result of the checks of an image."""

    digest: str
    target: str
    version: str
    base: str
    contents: dict[str, dict[str, str]] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    """Number of comparisons, by kind."""
    problems: list[str] = field(default_factory=list)
    """One line for each."""


@contextmanager
def as_we_write(what: str) -> Iterator[None]:
    """Turn errors about unexpected contents of an image into one error.

    Raises:
        VerifyError: the block found unexpected contents.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        msg = f"{what}: not in the form that a build writes: {type(error).__name__}: {error}"
        raise VerifyError(msg, "build the image again") from None


def records(files: Mapping[str, Entry], site: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each installed distribution's folder with its (path, sha256 in hex or '').

    Args:
        files: an image's files by their path without a leading slash.
        site: its folder of packages, with a slash at the end.

    Raises:
        VerifyError: a RECORD is invalid.
    """
    for name, entry in files.items():
        below = name.removeprefix(site)
        # one level down: vendored packages (in setuptools) are files, not installed
        if entry.data is not None and name != below and re.fullmatch(r"[^/]+/RECORD", below):
            with as_we_write(name):
                lines = csv.reader(io.StringIO(entry.data.decode()))
                rows = [(joined(site, row[0]), hex_of(row[1])) for row in lines if row]
            yield below.rpartition("/")[0], rows


def joined(site: str, path: str) -> str:
    """Return a RECORD's path below the root; those of scripts have ../ in them."""
    parts = [] if path.startswith("/") else site.strip("/").split("/")
    for part in path.strip("/").split("/"):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def hex_of(stated: str) -> str:
    """Return a RECORD's SHA-256 in hex, or ''."""
    kind, _, value = stated.partition("=")
    if kind != "sha256":
        return ""
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


def site_of(python: str) -> str:
    """Return the folder of packages of our images, without leading and with trailing slash.

    Args:
        python: the target's version, as in 3.11.
    """
    return f"{VENV}/lib/python{python}/site-packages/"


def byte_code(path: str) -> bool:
    """Return whether Python uses a file with its source only, which is checked."""
    return re.search(r"/__pycache__/[^/]+\.pyc$", path) is not None


def name_of(folder: str) -> str:
    """Return a distribution's name in a lock's form, from its .dist-info folder."""
    stem = folder.removesuffix(".dist-info").rpartition("-")[0]
    return re.sub(r"[-_.]+", "-", stem).lower()


def check(
    report: Report,
    files: Mapping[str, Entry],
    python: str,
    locked: Sequence[Locked],
    store: Store,
    fetch: str,
) -> None:
    """Compare every file of the environment with the RECORDs, or if it differs with the wheel.

    Args:
        files: as for ``records``.
        python: as for ``site_of``.
        locked: the lock of the wheels, which the store may have.
        fetch: the command that downloads them, for the message.
    """
    site = site_of(python)
    stated: dict[str, dict[str, str]] = {}
    for folder, rows in records(files, site):
        for path, sha256 in rows:
            stated.setdefault(path, {})[folder] = sha256
    count = astray = 0
    for path, hashes in stated.items():
        # a wheel's byte code is compiled again, with the hash of its source; a RECORD
        # has no hash of itself, and may lack others of its own folder
        if byte_code(path) or (not all(hashes.values()) and ".dist-info/" in path):
            continue
        count += 1
        folder, entry = next(iter(hashes)), files.get(path)
        if entry is None:
            report.problems.append(f"{path}: missing, but {folder}/RECORD lists it")
        # two packages may have it; the later one's stays
        elif entry.sha256 not in hashes.values():
            true = _in_the_wheel(locked, store, folder, path.removeprefix(site))
            if true == entry.sha256:
                astray += 1
                continue
            report.problems.append(
                f"{path}: differs from {folder}/RECORD"
                + ("" if true else f"; to compare with the wheel: {fetch}")
            )
    own = _of_the_venv(python)
    report.problems += [
        f"{path}: differs from what the recipe writes"
        for path, sha256 in own.items()
        if path not in files or files[path].sha256 != sha256
    ]
    for path in files:
        if site.startswith(f"{path}/"):
            report.problems.append(f"{path}: must be a folder, of the environment")
        elif path.startswith(f"{VENV}/") and not (path in stated or path in own or byte_code(path)):
            report.problems.append(f"{path}: in no distribution's RECORD")
    report.checked["installed files"] = count
    if astray:
        report.checked["of them match a wheel whose RECORD is wrong"] = astray


def _of_the_venv(python: str) -> dict[str, str]:
    """Return the hashes of the environment's files that are in no distribution."""
    settings = hashlib.sha256(b"home = /usr/bin\ninclude-system-site-packages = false\n")
    links = {"python": f"/usr/bin/python{python}", f"python{python}": "python", "python3": "python"}
    found = {f"{VENV}/bin/{name}": f"link to {target}" for name, target in links.items()}
    return {**found, f"{VENV}/lib64": "link to lib", f"{VENV}/pyvenv.cfg": settings.hexdigest()}


def _in_the_wheel(locked: Sequence[Locked], store: Store, folder: str, member: str) -> str | None:
    """Return the sha256 of a file in the locked wheel; None: not in the store.

    Some wheels have another wheel's RECORD (PyNvVideoCodec 2.0.4 for arm64). Their installed files
    are correct anyway, as the wheel's hash in the lock proves.
    """
    hashes = (sha256 for item in locked if item.name == name_of(folder) for sha256 in item.sha256s)
    for sha256 in hashes:
        for wheel in _downloads(store, sha256):
            with ZipFile(wheel) as opened:
                # for another platform or Python if it has no such file
                if {member, f"{folder}/RECORD"} <= set(opened.namelist()):
                    return hashlib.sha256(opened.read(member)).hexdigest()
    return None


def _downloads(store: Store, sha256: str) -> list[Path]:
    folder = store.download_path(sha256, "")
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in there if store.verified(sha256, path.name)]
