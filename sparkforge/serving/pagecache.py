"""Drop a model's files from the page cache, without root.

On unified memory every page of a cached weight file is a page that the GPU cannot have before the
kernel has reclaimed it. Dropping all caches takes root; ``posix_fadvise(DONTNEED)`` drops those of
a file that one may read, as far as they are clean and nobody has them mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def weight_files(model: Path) -> list[Path]:
    """Return the files of a checkpoint that are large: its safetensors."""
    return sorted(model.glob("*.safetensors"))


def expanded(folder: str) -> Path:
    """Return a folder with its ~ replaced; that of a user who is not here stays, as in the hub's
    own code, and is then no folder that is there."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return Path(folder)


def snapshot(hub: Path, name: str, revision: str | None) -> Path | None:
    """Return where the hub's cache keeps a model, or None while it is not there.

    Without a revision: the one that ``main`` stood for when it was fetched.
    """
    folder = hub / f"models--{name.replace('/', '--')}"
    if revision is None:
        ref = folder / "refs" / "main"
        if not ref.is_file():
            return None
        revision = ref.read_text(encoding="ascii").strip()
    found = folder / "snapshots" / revision
    return found if found.is_dir() else None


def evict(files: Iterable[Path]) -> int:
    """Drop files from the page cache as far as that goes; returns the bytes that were asked for.

    They are written to the disk first: what is not yet there stays in the cache.

    Raises:
        OSError: a file cannot be read.
    """
    asked = 0
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            asked += os.fstat(opened.fileno()).st_size
    return asked


def resident(file: Path) -> int:
    """Return how many bytes of a file are in the page cache, in whole pages.

    Raises:
        OSError: it cannot be read, or the kernel does not tell.
    """
    size = file.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    flags = ctypes.create_string_buffer((size + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
    with file.open("rb") as opened:
        # Python's own mmap gives no address without write access
        start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
        if start == ctypes.c_void_p(-1).value:
            raise OSError(number := ctypes.get_errno(), os.strerror(number), str(file))
        code = libc.mincore(start, size, flags)
        number = ctypes.get_errno()
        libc.munmap(start, size)
    if code != 0:
        raise OSError(number, os.strerror(number), str(file))
    return sum(flag & 1 for flag in flags.raw) * mmap.PAGESIZE
