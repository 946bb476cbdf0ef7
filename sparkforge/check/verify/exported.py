"""The files of an image or a container, from the stream of ``docker export``.

The engine unpacks the layers and checks their digests. Nothing of the image runs. Only the standard
library is used, for scripts/bytes.py.
"""

import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, cast


class _Stream:
    """The pieces of an export as a file; tarfile takes pieces of any size."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    def read(self, _size: int = -1) -> bytes:
        return next(self._pieces, b"")


def exported(pieces: Iterable[bytes]) -> Iterator[tuple[str, tarfile.TarInfo, Any]]:
    """Yield normal path, entry, and stream (None: no regular file) of each member; TarError."""
    with tarfile.open(fileobj=cast("Any", _Stream(pieces)), mode="r|") as archive:
        for member in archive:
            path = posixpath.normpath(f"/{member.name}").lstrip("/")
            yield path, member, archive.extractfile(member) if member.isreg() else None
