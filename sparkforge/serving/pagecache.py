"""Drop a model's files from the page cache, without root.

On unified memory the GPU cannot use a page of a cached weight file before the kernel has reclaimed
it. Dropping all caches needs root. ``posix_fadvise(DONTNEED)`` drops the pages of a readable file,
as far as they are clean and not mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def weight_files(model: Path) -> list[Path]:
    """Return the large files of a checkpoint: its safetensors."""
    return sorted(model.glob("*.safetensors"))


def expanded(folder: str) -> Path:
    """Return a folder with its ~ replaced; that of an unknown user stays, as in the hub's own
    code."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return Path(folder)


def snapshot(hub: Path, name: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's cache, or None.

    Args:
        revision: None: the one that ``main`` named at the last download.
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
    """Drop files from the page cache, as far as possible; returns their size in bytes.

    They are written to the disk first, since pages that are not there yet stay in the cache.

    Raises:
        OSError: a file cannot be read.
    """
    size = 0
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(opened.fileno()).st_size
    return size


def drop(files: Sequence[Path], say: Callable[[str], None]) -> None:
    """Drop files from the page cache and log the result; a failure only costs memory."""
    try:
        size = evict(files)
        left = sum(resident(file) for file in files)
    except OSError as error:
        say(f"warning: the weights stay in the page cache: {error}")
        return
    say(f"page cache: {size / 1e9:.1f} GB of weights dropped, {left / 1e9:.1f} GB remain")


def resident(file: Path) -> int:
    """Return the bytes of a file in the page cache, in whole pages.

    Raises:
        OSError: it cannot be read, or the kernel gives no answer.
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
