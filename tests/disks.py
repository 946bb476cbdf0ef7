"""Small ext4 file systems on loop devices, to fill them. They need root."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkforge.core.errors import CommandError, MachineError
from sparkforge.core.run import call

MIB = 1 << 20


@contextmanager
def mounted(folder: Path, *words: str) -> Iterator[None]:
    """Mount something on a folder for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    call("mount", *words, folder)
    try:
        yield
    finally:
        if call("umount", folder, check=False).returncode:
            call("umount", "--lazy", folder)  # after Ctrl-C a build still uses it, which ends next


@contextmanager
def new_disk(path: Path, mebibytes: int) -> Iterator[Path]:
    """Yield the file of a new ext4 file system."""
    with path.open("wb") as file:
        file.truncate(mebibytes * MIB)
    call("mkfs.ext4", "-q", path)
    try:
        yield path
    finally:
        path.unlink()


def fill(folder: Path) -> Path:
    """Fill a file system to its last byte; returns the file that does."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (MIB, 1024):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


def can_mount(folder: Path) -> bool:
    """Return whether this user may mount an ext4 image."""
    place = folder / "probe"
    try:
        with new_disk(folder / "probe.ext4", 8) as disk, mounted(place, "-o", "loop", str(disk)):
            pass
    except (CommandError, MachineError, OSError):
        return False
    return True
