"""Hash-locked requirements → a folder of verified wheels for one Python and platform.

Environment and image install from this folder alone, so they need no network and no registry
settings. ``pip download`` cannot choose among the files of a lock for another platform.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from typing import TypeVar

from packaging.markers import Marker, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import FetchError, PinsError
from sparkforge.core.index import Index, address_of, sha256_of, torch_files
from sparkforge.core.run import in_parallel
from sparkforge.sources.download import fetch
from sparkforge.store.store import Store

_T = TypeVar("_T")
_PARALLEL = 8
# newest glibc first: Ubuntu 24.04 (the Spark's) has 2.39, Debian 12 has 2.36
_GLIBC_MINOR = {"linux/amd64": 36, "linux/arm64": 39}
_MACHINE = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Locked:
    """One line of a lock: name, version, the sha256 of each of its files, and its condition."""

    name: str
    version: str
    sha256s: frozenset[str]
    marker: Marker | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Wanted:
    """Inputs of a wheelhouse; ``tools``: further locked wheels that the image's build runs (uv)."""

    lock: Path
    tools: tuple[Locked, ...]
    python: str
    platform: str
    torch_backend: str | None

    def items(self) -> list[Locked]:
        """Return the lines of the lock, and the tools, that apply."""
        every = {item.requirement: item for item in [*self.tools, *read_lock(self.lock)]}
        values = markers(self.python, self.platform)
        return [one for one in every.values() if one.marker is None or one.marker.evaluate(values)]


def read_lock(path: Path) -> list[Locked]:
    """Read a requirements file; PinsError: a line is not NAME==VERSION with hashes."""
    result = []
    text = re.sub(r"(^|\s)#.*$", "", path.read_text("utf-8", "replace"), flags=re.MULTILINE)
    for line in filter(str.strip, re.sub(r"\\[ \t]*\n", " ", text).splitlines()):
        try:
            wanted = Requirement(line.partition(" --")[0])
            (pin,) = wanted.specifier
            hashes = frozenset(_HASH.findall(line))
            if pin.operator != "==" or not hashes:
                raise ValueError(line)
            Version(pin.version)
            if wanted.marker is not None:
                wanted.marker.evaluate(markers("3.11", "linux/amd64"))
        except (InvalidRequirement, LookupError, ValueError):  # of markers and versions, too
            msg = f"{path}: {line.strip()[:60]!r} is not NAME==VERSION with --hash=sha256"
            raise PinsError(msg, "update the lock with scripts/lock.sh") from None
        name = str(canonicalize_name(wanted.name))
        result.append(Locked(name, pin.version, hashes, wanted.marker))
    return result


def markers(python: str, platform: str) -> dict[str, str]:
    """Return the values of requirements' markers for a Python and platform."""
    return {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
        "platform_machine": _MACHINE[platform],
        "extra": "",
    }


@cache
def _ranks(python: str, platform: str) -> Mapping[Tag, int]:
    """Return the wheel tags that an interpreter on a platform installs, the best with 0."""
    machine = _MACHINE[platform]
    glibcs = (f"manylinux_2_{minor}" for minor in range(_GLIBC_MINOR[platform], 4, -1))
    kinds = [*glibcs, "manylinux2014", "manylinux2010", "manylinux1", "linux"]
    platforms = [f"{kind}_{machine}" for kind in kinds]
    major, minor = (int(part) for part in python.split("."))
    # explicit abis: the default is the running interpreter's
    tags = list(cpython_tags((major, minor), abis=[f"cp{major}{minor}"], platforms=platforms))
    tags += compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms)
    return {tag: rank for rank, tag in enumerate(dict.fromkeys(tags))}


def _best(item: Locked, files: Mapping[str, _T], python: str, platform: str) -> _T | None:
    """Return the value of the file name that an interpreter installs for a line, or None."""
    ranks = _ranks(python, platform)
    found: dict[tuple[int, str], _T] = {}
    for name, value in files.items():
        try:
            project, version, _, tags = parse_wheel_filename(name)
        except (InvalidWheelFilename, InvalidVersion):
            continue  # an sdist, or an old name
        fits = [ranks[tag] for tag in tags if tag in ranks]
        if fits and project == item.name and version == Version(item.version):
            found[min(fits), name] = value
    return found[min(found)] if found else None


def in_store(store: Store, item: Locked, python: str, platform: str) -> tuple[str, Path] | None:
    """Return sha256 and path of a line's file in the store; not hashed again."""
    files = {
        path.name: (sha256, path)
        for sha256 in item.sha256s
        for path in store.download_path(sha256, "").glob("*.whl")
    }
    return _best(item, files, python, platform)


def missing(store: Store, wanted: Wanted) -> int:
    """Return the number of a wheelhouse's files that the store lacks."""
    found = [in_store(store, item, wanted.python, wanted.platform) for item in wanted.items()]
    return found.count(None)


def fill(
    store: Store, wanted: Wanted, index: Index, uv: Path, *, offline: bool, into: Path
) -> dict[str, str]:
    """Fetch every locked requirement, link the files into a folder; return the sha256 of each."""

    def fetched(item: Locked, stopping: Event) -> Path:
        found = in_store(store, item, wanted.python, wanted.platform)
        if found is not None and store.verified(found[0], found[1].name):
            return found[1]
        if offline:
            msg = f"{item.requirement}: no locked file is in the store, and --offline is set"
            raise FetchError(msg, "run once without --offline on a machine with network")
        name, url, sha256 = _located(item, wanted, index, uv)
        return fetch(store, name=name, sha256=sha256, locate=lambda: url)

    paths = [*in_parallel(fetched, wanted.items(), _PARALLEL)]
    for path in paths:
        os.link(path, into / path.name)
    return {path.name: path.parent.name for path in paths}


def _located(item: Locked, wanted: Wanted, index: Index, uv: Path) -> tuple[str, str, str]:
    """Return (file name, url, sha256) of the most suitable locked file."""
    machine = _MACHINE[wanted.platform]

    def best(files: Iterable[tuple[str, str, str | None]]) -> tuple[str, str, str] | None:
        locked = {name: (name, url, sha) for name, url, sha in files if sha in item.sha256s}
        return _best(item, locked, wanted.python, wanted.platform)

    # an index without hashes does not identify the locked file; one in a folder is hashed
    found = best(
        (
            link.filename,
            address_of(link).partition("#")[0],
            sha256_of(link) or (sha256_file(link.file_path) if link.is_file else None),
        )
        for link in index.links(item.name)
    )
    if found is None and item.name == "torch" and (backend := wanted.torch_backend) is not None:
        found = best(torch_files(item.requirement, wanted.python, machine, backend, uv))
    if found is None:
        msg = f"{item.requirement}: the package index of pip's configuration has no file that is"
        msg += f" locked in {wanted.lock.name} and fits Python {wanted.python} on {wanted.platform}"
        raise FetchError(msg, "give pip an index or folder that has it (PIP_EXTRA_INDEX_URL)")
    return found
