"""Change several files of the checkout together or not at all, even after ``kill -9``.

The new files are written to ``.sparkforge/change.new``. Its rename to ``change`` decides the
change. Then each file moves to its place. After a kill the next command that reads the checkout
completes the moves. A checkout that cannot be written is a StoreError.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sparkforge.core import plain
from sparkforge.core.errors import StoreError
from sparkforge.core.log import log

_FOLDER, _DECIDED, _PLAN = ".sparkforge", "change", "plan.json"


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Lock the checkout: files that the block reads do not change before ``change``."""
    from filelock import FileLock  # most commands change nothing

    folder = root / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock"):
            _finish(root)
            yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR) and not folder.is_dir():
            raise StoreError(f"{folder}: is not a folder", "move it away") from None
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise _refused(error) from None


def finish(root: Path) -> None:
    """Finish a decided change after a kill; usually this only checks for a path."""
    if (root / _FOLDER / _DECIDED).exists():
        with held(root):
            pass


def change(root: Path, files: Mapping[Path, bytes | None]) -> None:
    """Write files below ``root`` (None: remove it), all of them or none.

    Call it inside ``held``.

    Raises:
        StoreError: a folder cannot be written, or is in the place of a file; nothing has changed.
    """
    for path in files:
        if path.is_dir():  # after the decision no command could finish it
            raise StoreError(f"{path}: is a folder, but a file is needed", "move it away")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise StoreError(f"{path.parent}: is not a folder", "move it away") from None
        if not os.access(path.parent, os.W_OK):  # before the decision
            raise _refused(OSError(errno.EACCES, os.strerror(errno.EACCES), str(path.parent)))
    fresh = root / _FOLDER / f"{_DECIDED}.new"
    shutil.rmtree(fresh, ignore_errors=True)  # of a killed run, since this process has the lock
    fresh.mkdir()
    plan = []
    for number, (path, data) in enumerate(files.items()):
        plan.append([str(path.relative_to(root)), data is not None])
        if data is not None:
            staged = fresh / str(number)
            _write(staged, data)
            if path.exists():
                shutil.copymode(path, staged)
    _write(fresh / _PLAN, json.dumps(plan).encode())
    fresh.rename(root / _FOLDER / _DECIDED)
    _finish(root)


def _finish(root: Path) -> None:
    decided = root / _FOLDER / _DECIDED
    if not decided.exists():
        return
    plan = decided / _PLAN
    if plan.exists():
        try:
            steps = [(str(name), bool(stays)) for name, stays in plain.json_of(plan.read_bytes())]
            if strange := [name for name, _ in steps if not _inside(root, name)]:
                raise ValueError(f"{strange[0]} is outside the checkout")
        except (ValueError, TypeError) as error:
            msg = f"{plan}: not the plan of a change: {error}"
            remedy = "move that folder away, and restore patches/ and pins.yaml from git"
            raise StoreError(msg, remedy) from None
        for number, (name, stays) in enumerate(steps):
            if not stays:
                (root / name).unlink(missing_ok=True)
            elif (decided / str(number)).exists():  # else it is in its place already
                # `git clean` removes a new folder that is still empty
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (decided / str(number)).replace(root / name)
        log.detail(f"{root}: {plan} finished")
        plan.unlink()
    shutil.rmtree(decided)


def _inside(root: Path, name: str) -> bool:
    return (root / name).is_relative_to(root) and ".." not in Path(name).parts


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave names without content


def _refused(error: OSError) -> StoreError:
    what = f"{error.filename}: {error.strerror}"
    return StoreError(what, "give the user write access to the checkout")
