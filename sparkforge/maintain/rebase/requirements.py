"""The requirements that a release wheel declares, read without fetching the wheel.

A wheel is a zip archive, whose list of members is at its end: a few parts of the file are enough.
The wheel's sha256 cannot check parts: they serve to warn, never to build.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkforge.core.errors import FetchError
from sparkforge.core.log import log
from sparkforge.pins.pins import ReleaseFile
from sparkforge.sources import wheelhouse
from sparkforge.sources.sources import Access
from sparkforge.sources.wheelhouse import markers
from sparkforge.store.store import Store
from sparkforge.wheels.archive import UNREADABLE

if TYPE_CHECKING:
    import requests

_PART = 1 << 16  # bytes asked for at once; vLLM's list of members has some 600 kB
_LIMIT = 4 << 20  # bytes of METADATA, its long description included
_TIMEOUT_S = (15, 60)  # to connect, and between two reads


def applying(requirements: list[Requirement], python: str, platform: str) -> list[Requirement]:
    """Return the requirements for a Python (``3.12``) and platform (``linux/arm64``)."""
    env = markers(python, platform)
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(env)
    ]


def disagreeing(
    requirements: list[Requirement], have: Mapping[str, str], without: frozenset[str]
) -> list[str]:
    """Return, for people, each requirement that a set of versions does not meet.

    Args:
        have: versions by canonical name.
        without: canonical names of packages that are left out.
    """
    found = {}
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in without:
            continue
        if name not in have:
            found[name] = f"{name}: none (wanted {requirement.specifier or 'any'})"
        elif not requirement.specifier.contains(have[name], prereleases=True):
            found[name] = f"{name} {have[name]} (wanted {requirement.specifier})"
    return [found[name] for name in sorted(found)]


def of_package(
    name: str, version: str, python: str, platform: str, access: Access
) -> list[Requirement]:
    """Return what a package declares in the wheel that a Python on a platform installs.

    Raises:
        FetchError: the index has no such wheel, or reading it needs the whole file.
    """
    what = f"{name} {version} for Python {python} on {platform}"
    if access.offline:
        raise FetchError(f"{what}: not in the store", "run without --offline")
    link = wheelhouse.fitting(name, version, access.index.links(name), python, platform)
    if link is None:
        remedy = "check pip's configuration (pip config list)"
        raise FetchError(f"{what}: the package index has no wheel", remedy)
    try:
        found = _parsed(_remote(str(link.normalized).partition("#")[0]))
    except (OSError, *UNREADABLE) as error:
        msg = f"{link.filename}: cannot read its METADATA: {type(error).__name__}: {error}"
        raise FetchError(msg, "use an index that supports range requests") from error
    return applying(found, python, platform)


def declared(store: Store, file: ReleaseFile, access: Access) -> list[Requirement] | None:
    """Return the requirements of a wheel; None if reading them needs the whole file."""
    try:
        return _parsed(_metadata(store, file, access))
    except (FetchError, OSError, *UNREADABLE) as error:
        # requests' errors are OSErrors
        log.detail(f"{file.file}: cannot read its METADATA: {type(error).__name__}: {error}")
        return None


def _parsed(text: bytes) -> list[Requirement]:
    found = []
    for line in BytesHeaderParser().parsebytes(text).get_all("Requires-Dist") or []:
        try:
            found.append(Requirement(str(line)))
        except InvalidRequirement as error:
            log.detail(f"Requires-Dist: {line}: {error}")
    return found


def _metadata(store: Store, file: ReleaseFile, access: Access) -> bytes:
    here = store.download_path(file.sha256, file.file)
    if here.is_file():
        with here.open("rb") as opened:
            return _member(opened)
    if access.offline:
        raise FetchError(f"{file.file}: not in the store", "run without --offline")
    return _remote(access.index.url_of(file.project, file.file))


def _remote(url: str) -> bytes:
    if urlsplit(url).scheme == "file":
        with Path(unquote(urlsplit(url).path)).open("rb") as opened:
            return _member(opened)
    import requests

    with requests.Session() as session:
        return _member(io.BufferedReader(_Remote(session, url), _PART))


def _member(file: io.BufferedIOBase) -> bytes:
    with zipfile.ZipFile(file) as wheel:
        for info in wheel.infolist():
            if info.filename.endswith(".dist-info/METADATA") and info.filename.count("/") == 1:
                with wheel.open(info) as member:
                    text = member.read(_LIMIT + 1)
                if len(text) <= _LIMIT:
                    return text
    raise ValueError(f"no METADATA of at most {_LIMIT} bytes")


class _Remote(io.RawIOBase):
    """A file on a server that gives parts of it; only the parts that are read are fetched."""

    def __init__(self, session: requests.Session, url: str) -> None:
        self.session, self.url, self.at = session, url, 0
        with self._part(0, 0) as reply:
            self.size = int(reply.headers["Content-Range"].rpartition("/")[2])

    def _part(self, first: int, last: int) -> requests.Response:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{last}"}
        # not read at once: a server that ignores the range would send all of it
        reply = self.session.get(self.url, headers=headers, timeout=_TIMEOUT_S, stream=True)
        reply.raise_for_status()
        if reply.status_code != 206 or "Content-Range" not in reply.headers:
            reply.close()
            raise ValueError("its server does not support range requests")
        return reply

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        self.at = max(0, start + offset)
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.size - self.at)
        if wanted <= 0:
            return 0
        with self._part(self.at, self.at + wanted - 1) as reply:
            data = reply.raw.read(wanted + 1)
        if len(data) != wanted:
            raise ValueError("its server returned another range than requested")
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
