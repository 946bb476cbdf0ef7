"""Atomic writes, and errors of the disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkforge.core import plain
from sparkforge.core.errors import SparkforgeError, StoreError
from sparkforge.core.log import human_bytes

_FULL = 64 << 10  # with fewer bytes free a failed write counts as a full disk
_ROOM = (
    "free space (build.py clean deletes build results), or put the store on"
    " a larger disk with --store DIR or SPARKFORGE_STORE; the next run continues from here"
)


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into one StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(where) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            msg = f"{error.filename or where}: {error.strerror}"
            raise StoreError(msg, "give the user write access, or choose --store DIR") from error
        if error.errno == errno.ENOENT and not where.parent.exists():
            msg = f"{where.parent}: was removed meanwhile, for example by build.py clean"
            raise StoreError(msg, "run the command again") from error
        raise
    except SparkforgeError as error:
        # programs that we run report a full disk in their own messages
        if isinstance(error, StoreError) or free(where) > _FULL:
            raise
        raise _disk_full(where, f":\n{error.what}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object; None if the file is missing or has no JSON object."""
    try:
        value = plain.json_of(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None  # cut off by a power failure, or damaged
    return value if isinstance(value, dict) else None


def write_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, even if the power fails; its mode stays."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fresh = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(handle)
            fresh.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
            fresh.rename(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def write_files(files: Mapping[Path, bytes | None]) -> None:
    """Replace files, each atomically; None removes one.

    Raises:
        StoreError: a folder cannot be written, or is in the place of a file; nothing has changed.
    """
    for path in files:
        if path.is_dir():
            raise StoreError(f"{path}: is a folder, but a file is needed", "move it away")
        with disk_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                msg = f"{path.parent}: is not a folder"
                raise StoreError(msg, "move it away") from None
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent))
    for path, data in files.items():
        if data is None:
            path.unlink(missing_ok=True)
        else:
            write_file(path, data)


def sync(path: Path) -> None:
    """Write a file to the disk: a power cut must not leave its name without its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_full(where: Path, more: str = "") -> StoreError:
    what = f"{where}: the disk is full ({human_bytes(free(where))} free){more}"
    return StoreError(what, _ROOM)


def free(where: Path) -> int:
    """Return the free bytes of the file system of a path, which need not exist."""
    while not where.exists():
        where = where.parent
    return shutil.disk_usage(where).free
