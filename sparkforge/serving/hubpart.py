"""A partly downloaded file: it continues an earlier process' part, and computes its hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from sparkforge.serving.hubfiles import Listed

_SYNC_BYTES = 256 << 20  # of a file in the page cache, before they are written to disk and dropped


class WrongBytesError(Exception):
    """A file has other bytes than the hub lists."""


class Part:
    """The downloaded part of a file, and its hash so far.

    Args:
        path: of the part; bytes of an earlier process are kept.
    """

    def __init__(self, path: Path, file: Listed) -> None:
        self.file, self.size, self._synced = file, 0, 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._hash = self._new_hash()
        if os.fstat(self._fd).st_size > file.size:
            os.ftruncate(self._fd, 0)
        while piece := os.pread(self._fd, 1 << 20, self.size):
            self._hash.update(piece)
            self.size += len(piece)
        self.kept = self.size

    def _new_hash(self) -> hashlib._Hash:
        if len(self.file.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def restart(self) -> None:
        """Discard the bytes."""
        os.ftruncate(self._fd, 0)
        self.size = self.kept = self._synced = 0
        self._hash = self._new_hash()

    def write(self, piece: bytes) -> None:
        """Add bytes.

        Raises:
            WrongBytesError: more bytes than the file has.
            OSError: the disk is full.
        """
        if self.size + len(piece) > self.file.size:
            raise WrongBytesError(f"{self.file.path} has more than its {self.file.size} bytes")
        view = memoryview(piece)
        while view:
            written = os.pwrite(self._fd, view, self.size)
            self._hash.update(view[:written])
            self.size += written
            view = view[written:]
        if self.size - self._synced > _SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Write the bytes to disk, and drop them from the page cache."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self.size

    def is_right(self) -> bool:
        """Return whether the file is complete and has its hash."""
        return self.size == self.file.size and self._hash.hexdigest() == self.file.digest

    def close(self) -> None:
        os.close(self._fd)
