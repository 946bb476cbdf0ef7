"""Hash-locked requirements → a folder of verified wheels for one Python and platform.

Environment and image install from this folder alone: their builds need no network and no
registry settings, and every file in it has passed its sha256.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import FetchError, PinsError
from sparkforge.core.index import Index, address_of, sha256_of, torch_link
from sparkforge.core.run import in_parallel
from sparkforge.sources import sizes
from sparkforge.sources.download import Fetches, fetch
from sparkforge.store.store import Store

if TYPE_CHECKING:
    from unearth.link import Link

_PARALLEL = 8
# newest glibc first: Ubuntu 24.04 (the Spark's) has 2.39, Debian 12 has 2.36
_GLIBC_MINOR = {"linux/amd64": 36, "linux/arm64": 39}
_MACHINE = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


@dataclass(frozen=True)
class Locked:
    """One line of a lock: name, version, and the sha256 of each of its files.

    ``marker``: the condition behind a semicolon, e.g. ``python_full_version < '3.12'``.
    """

    name: str
    version: str
    sha256s: frozenset[str]
    marker: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Wanted:
    """Inputs of a wheelhouse."""

    lock: Path
    tools: tuple[Locked, ...]
    """Further locked wheels that the image's build runs (uv)."""
    python: str
    """e.g. ``3.11``."""
    platform: str
    """e.g. ``linux/amd64``."""
    torch_backend: str | None
    """uv's name of the PyTorch build, or None."""


_LINE = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s;\\]+)(\s*;(?P<marker>.*?)(?= --))?"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_lock(path: Path) -> list[Locked]:
    """Read a requirements file in which every line is pinned and hashed.

    Raises:
        PinsError: a line is neither.
    """
    result = []
    body, first = "", 0
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*lines, ""], 1):
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        first = first if body else number
        body = f"{body} {text.removesuffix(chr(92))}".strip()
        if text.endswith("\\") or not body:
            continue
        match, hashes = _LINE.match(body), _HASH.findall(body)
        if match is None or not hashes:
            msg = f"{path}:{first}: {body[:60]!r} is not NAME==VERSION with --hash=sha256"
            raise PinsError(msg, "update the lock with scripts/lock.sh")
        name = str(canonicalize_name(match["name"]))
        marker = (match["marker"] or "").strip() or None
        if marker is not None and (wrong := _marker_problem(marker)):
            msg = f"{path}:{first}: {marker!r} is not a marker: {wrong}"
            raise PinsError(msg, "update the lock with scripts/lock.sh")
        result.append(Locked(name, match["version"], frozenset(hashes), marker))
        body = ""
    return result


def _marker_problem(text: str) -> str:
    from packaging.markers import InvalidMarker, Marker  # a target's lock has few or none

    try:
        Marker(text)
    except InvalidMarker as error:
        return str(error).partition("\n")[0]
    return ""


def markers(python: str, platform: str) -> dict[str, str]:
    """Return the values of requirements' markers for a Python and platform."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_release": "",
        "platform_version": "",
        "platform_machine": _MACHINE[platform],
        "extra": "",
    }


def _applies(item: Locked, python: str, platform: str) -> bool:
    """Return whether a line applies to this Python and platform."""
    from packaging.markers import Marker

    return item.marker is None or Marker(item.marker).evaluate(markers(python, platform))


def platform_tags(python: str, platform: str) -> list[Tag]:
    """Return the wheel tags that an interpreter on a platform installs, best first."""
    machine = _MACHINE[platform]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_GLIBC_MINOR[platform], 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    platforms.append(f"linux_{machine}")
    major, minor = (int(part) for part in python.split("."))
    # explicit abis: the default is the running interpreter's
    tags = list(cpython_tags((major, minor), abis=[f"cp{major}{minor}"], platforms=platforms))
    tags += compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms)
    return tags


def applying(
    locked: Sequence[Locked], tools: Sequence[Locked], python: str, platform: str
) -> list[Locked]:
    """Return the lines of a lock, and the tools, that apply to a Python and platform."""
    items = {item.requirement: item for item in [*tools, *locked]}  # the lock may have a tool, too
    return [item for item in items.values() if _applies(item, python, platform)]


def in_store(store: Store, item: Locked, python: str, platform: str) -> tuple[str, Path] | None:
    """Return sha256 and path of a line's file in the store; not hashed again."""
    return _stored(store, item, _ranked(python, platform))


def recorded(
    item: Locked, python: str, platform: str, known: Mapping[str, sizes.Known]
) -> sizes.Known | None:
    """Return the recorded file of a line for a Python and platform, or None."""
    rank = _ranked(python, platform)
    files = (known[sha256] for sha256 in item.sha256s if sha256 in known)
    fitting = [
        (best, file.sha256)
        for file in files
        if (best := _fitness(file.name, item, rank)) is not None
    ]
    return known[min(fitting)[1]] if fitting else None


def to_fetch(store: Store, wanted: Wanted, known: Mapping[str, sizes.Known]) -> Fetches:
    """Return the downloads of a wheelhouse."""
    sized: dict[str, int] = {}
    unknown = 0
    for item in applying(read_lock(wanted.lock), wanted.tools, wanted.python, wanted.platform):
        if in_store(store, item, wanted.python, wanted.platform) is not None:
            continue
        file = recorded(item, wanted.python, wanted.platform, known)
        if file is None:
            unknown += 1
        else:
            sized[file.sha256] = file.size
    return Fetches(sized, (f"{unknown} wheels of {wanted.lock.name}",) if unknown else ())


def fill(
    store: Store,
    wanted: Wanted,
    index: Index,
    uv: Path,
    *,
    offline: bool,
    into: Path,
    known: Mapping[str, sizes.Known] | None = None,
) -> int:
    """Fetch every locked requirement and link the files into a folder.

    Args:
        known: sizes of files, for the progress line.

    Returns:
        The number of files.

    Raises:
        FetchError, IntegrityError: as ``download.fetch``; FetchError also where no listed file
            is both locked and suitable for the platform.
    """
    locked = applying(read_lock(wanted.lock), wanted.tools, wanted.python, wanted.platform)
    found = [recorded(item, wanted.python, wanted.platform, known or {}) for item in locked]
    sized = [file.size for file in found if file is not None]
    total = sum(sized) if len(sized) == len(locked) else None
    progress = sizes.Progress("third-party wheels", len(locked), total)

    def fetched(item: Locked, stopping: Event) -> Path:
        def arrived(done: int, _: int | None) -> None:
            if stopping.is_set():
                raise _Stopped
            progress.arrived(item.name, done)

        path = _in_store(store, item, _ranked(wanted.python, wanted.platform))
        if path is None:
            if offline:
                msg = f"{item.requirement}: no locked file of it is in the store"
                remedy = "run once without --offline on a machine with network"
                raise FetchError(f"{msg}, and --offline is set", remedy)
            url, name, sha256 = _located(item, wanted, index, uv)
            size = known[sha256].size if known and sha256 in known else None
            path = fetch(
                store, name=name, sha256=sha256, locate=lambda: url, size=size, progress=arrived
            )
        progress.arrived(item.name, path.stat().st_size, done=True)
        return path

    for path in in_parallel(fetched, locked, _PARALLEL):
        os.link(path, into / path.name)
    return len(locked)


def fitting(
    name: str, version: str, links: Sequence[Link], python: str, platform: str
) -> Link | None:
    """Return the wheel of a release that a Python on a platform installs; None: there is none."""
    item = Locked(str(canonicalize_name(name)), version, frozenset())
    rank = _ranked(python, platform)
    ranked = [(_fitness(link.filename, item, rank), link) for link in links]
    best = [(fit, link.filename, link) for fit, link in ranked if fit is not None]
    return min(best, key=lambda one: one[:2])[2] if best else None


def damaged(folder: Path, wanted: Wanted) -> list[str]:
    """Return the names of files that match no locked hash of their name."""
    locked: dict[str, set[str]] = {}
    for item in [*wanted.tools, *read_lock(wanted.lock)]:
        locked.setdefault(item.name, set()).update(item.sha256s)

    def differs(path: Path, stopping: Event) -> str | None:
        project = str(canonicalize_name(path.name.partition("-")[0]))
        return None if sha256_file(path) in locked.get(project, ()) else path.name

    return [name for name in in_parallel(differs, sorted(folder.glob("*.whl")), _PARALLEL) if name]


class _Stopped(Exception):
    """Ends a download that is no longer needed: another failed, or Ctrl-C."""


def _located(item: Locked, wanted: Wanted, index: Index, uv: Path) -> tuple[str, str, str]:
    """Return (url, file name, sha256) of the most suitable locked file."""
    links = index.links(item.name)
    if found := min(
        _candidates(item, links, _ranked(wanted.python, wanted.platform)), default=None
    ):
        return found[1:]
    if item.name == "torch" and wanted.torch_backend is not None:
        machine = _MACHINE[wanted.platform]
        url, sha256 = torch_link(item.requirement, wanted.python, machine, wanted.torch_backend, uv)
        if sha256 not in item.sha256s:
            msg = f"{item.requirement}: PyTorch's index has sha256 {sha256}, which is not locked"
            raise FetchError(msg, f"compare them, then update the lock: {wanted.lock.name}")
        return url, unquote(urlsplit(url).path.rpartition("/")[2]), sha256
    msg = (
        f"{item.requirement}: the package index of pip's configuration has no file that is"
        f" locked in {wanted.lock.name} and fits Python {wanted.python} on {wanted.platform}"
    )
    remedy = (
        "configure pip with an index or folder that has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)"
    )
    raise FetchError(msg, remedy)


def _fitness(name: str, item: Locked, rank: dict[Tag, int]) -> int | None:
    try:
        project, version, _, tags = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion):
        return None  # an sdist, or an old name
    if project != item.name or version != Version(item.version):
        return None
    return min((rank[tag] for tag in tags if tag in rank), default=None)


@cache
def _ranked(python: str, platform: str) -> dict[Tag, int]:
    return {tag: i for i, tag in enumerate(platform_tags(python, platform))}


def _in_store(store: Store, item: Locked, rank: dict[Tag, int]) -> Path | None:
    found = _stored(store, item, rank)
    return found[1] if found and store.verified(found[0], found[1].name) else None


def _stored(store: Store, item: Locked, rank: dict[Tag, int]) -> tuple[str, Path] | None:
    fitting = []
    for sha256 in item.sha256s:
        folder = store.download_path(sha256, "")
        if folder.is_dir():
            for path in folder.iterdir():
                if (fitness := _fitness(path.name, item, rank)) is not None:
                    fitting.append((fitness, sha256, path))
    if not fitting:
        return None
    _, sha256, path = min(fitting)
    return sha256, path


def _candidates(
    item: Locked, links: Sequence[Link], rank: dict[Tag, int]
) -> Iterator[tuple[int, str, str, str]]:
    for link in links:
        fitness = _fitness(link.filename, item, rank)
        if fitness is None:
            continue
        # an index without hashes does not identify the locked file; one in a folder is hashed
        sha256 = sha256_of(link) or (sha256_file(link.file_path) if link.is_file else None)
        if sha256 in item.sha256s:
            yield fitness, address_of(link).partition("#")[0], link.filename, sha256
