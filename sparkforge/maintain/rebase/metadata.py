"""The requirements that a release wheel declares, read without fetching the wheel.

A wheel is a zip archive, whose list of members is at its end: a few parts of the file are enough.
The wheel's sha256 cannot check parts: they serve to warn, never to build.
"""

from __future__ import annotations

import io
import zipfile
from email.parser import BytesHeaderParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from sparkforge.core.errors import FetchError
from sparkforge.pins.pins import ReleaseFile
from sparkforge.sources import wheelhouse
from sparkforge.sources.project import Project
from sparkforge.sources.wheelhouse import markers
from sparkforge.wheels.archive import UNREADABLE

_PART = 1 << 16  # bytes asked for at once; vLLM's list of members has some 600 kB
_TIMEOUT_S = (15, 60)  # to connect, and between two reads


def applying(requirements: list[Requirement], python: str, platform: str) -> list[Requirement]:
    """Return the requirements for a Python (``3.12``) and platform (``linux/arm64``)."""
    env = markers(python, platform)
    return [one for one in requirements if one.marker is None or one.marker.evaluate(env)]


def declared(project: Project, file: ReleaseFile) -> list[Requirement]:
    """Return what a wheel of a release declares.

    Raises:
        FetchError: reading it needs the whole file, or the network.
    """
    here = project.store.download_path(file.sha256, file.file)
    if here.is_file():
        return _read(here.as_uri(), file.file)
    if project.access.offline:
        raise FetchError(f"{file.file}: not in the store", "run without --offline")
    return _read(project.access.index.url_of(file.project, file.file), file.file)


def of_package(
    name: str, version: str, python: str, platform: str, project: Project
) -> list[Requirement]:
    """Return what a package declares in the wheel that a Python on a platform installs.

    Raises:
        FetchError: the index has no such wheel, or reading it needs the whole file.
    """
    links = project.access.index.links(name)
    link = wheelhouse.fitting(name, version, links, python, platform)
    if link is None:
        msg = f"{name} {version} for Python {python} on {platform}: the index has no wheel"
        raise FetchError(msg, "check pip's configuration (pip config list)")
    found = _read(str(link.normalized).partition("#")[0], link.filename)
    return applying(found, python, platform)


def _read(url: str, name: str) -> list[Requirement]:
    try:
        if urlsplit(url).scheme == "file":
            with Path(unquote(urlsplit(url).path)).open("rb") as file:
                text = _member(file)
        else:
            text = _member(io.BufferedReader(_Remote(url), _PART))
        lines = BytesHeaderParser().parsebytes(text).get_all("Requires-Dist") or []
        return [Requirement(str(line)) for line in lines]
    except (OSError, InvalidRequirement, *UNREADABLE) as error:  # requests' errors are OSErrors
        msg = f"{name}: cannot read its METADATA: {type(error).__name__}: {error}"
        raise FetchError(msg, "use an index that supports range requests") from error


def _member(file: io.BufferedIOBase) -> bytes:
    with zipfile.ZipFile(file) as wheel:
        for name in wheel.namelist():
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1:
                return wheel.read(name)
    raise ValueError("no METADATA")


class _Remote(io.RawIOBase):
    """A file on a server that gives parts of it; only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        import requests

        self.session, self.url, self.at = requests.Session(), url, 0
        self.size = 1
        self.size = int(self._part(0, 0)[1].rpartition("/")[2])

    def _part(self, first: int, last: int) -> tuple[bytes, str]:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-{last}"}
        # not read at once: a server that ignores the range would send all of it
        with self.session.get(self.url, headers=headers, timeout=_TIMEOUT_S, stream=True) as reply:
            reply.raise_for_status()
            if reply.status_code != 206:
                raise ValueError("its server does not support range requests")
            return reply.raw.read(last - first + 1), reply.headers["Content-Range"]

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
        data, _ = self._part(self.at, self.at + wanted - 1)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
