"""Files that survive a power cut: without a sync, a file can get its name before its bytes."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def replace(path: Path, text: str) -> None:
    """Replace a file; after a power cut it is the old or the new one, and then the new one.

    Raises:
        OSError: it cannot be written.
    """
    # random: two containers with one volume have the same process ids
    whole = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with whole.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)  # the name
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems sync no folder
            raise
    finally:
        os.close(handle)


def sync(folder: Path) -> None:
    """Write all files of a folder's file system to its disk.

    One call for thousands of files: a sync of each would wait for the disk as often.

    Raises:
        OSError: they cannot be written.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(handle)
