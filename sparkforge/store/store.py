"""The store: downloads, git mirrors and finished artefacts; the only module that touches it.

Layout under the root::

    CACHEDIR.TAG
    downloads/<sha256>/<file name>     verified release files; read-only once named
    partial/<sha256>                   a partial download; the next run continues it
    git/<upstream>.git                 bare repositories
    artefacts/<stage>/<key>/           finished results, each with its artefact.json
    last/<target>/<label>.json         inputs of a target's newest build
    unpacked/                          uv's cache of wheels, which environments are linked from
    serve/                             files that servers of virtual environments write
    compile/<wheel>-<key>/, ccache/    an unfinished compile; results of compilers, by ccache
    tmp/                               work in progress; each folder locked by its maker, swept
                                       when that lock is free
    locks/                             one file a resource, held with flock: gone with its holder

Nothing gets its final name before it is complete and checked, so ``kill -9`` at any point
leaves only files under ``partial`` and ``tmp``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkforge.core.disk import disk_errors, flocked, read_json, write_file
from sparkforge.core.errors import IntegrityError, StoreError
from sparkforge.core.hashing import key_of, sha256_file
from sparkforge.core.log import log
from sparkforge.store import marker
from sparkforge.store.artefact import Artefact, T, load, record

_FOLDERS = ("downloads", "partial", "git", "artefacts", "last", "tmp", "locks")
INTERPRETERS = "interpreters"
_RESULTS = ("artefacts", "last", "compile", "unpacked")
_REST = ("downloads", "partial", "git", "serve", "ccache", INTERPRETERS)
_SHARED = (
    "downloads",
    "partial",
    "git",
    "locks",
    "unpacked",
    INTERPRETERS,
    "artefacts/intake",
    "artefacts/sources",
    "artefacts/kernels",
    "artefacts/wheelhouse",
    "artefacts/smoke",
)
"""Stages that a borrowed store shares; of ``smoke`` only the unpatched release is used."""
_OURS = "sparkforge-"
"""Before the name of each temporary folder: no other one is removed."""
_TEMPORARY = re.compile(rf"{_OURS}[\w. -]+-[a-z0-9_]{{8}}")  # as mkdtemp names them


class Store:
    """Access to one store folder; made on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prepared = False

    def _prepare(self) -> None:
        """Create the folders; called before a write, so that a dry run leaves no trace."""
        if self._prepared:
            return
        with disk_errors(self.root):
            marker.refuse_others(self.root)
            try:
                marker.mark(self.root)  # before the folders that it explains
                for name in _FOLDERS:
                    (self.root / name).mkdir(parents=True, exist_ok=True)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
                what = "cannot be created" if error.errno == errno.ENOENT else "is not a folder"
                msg = f"{error.filename}: {what}, so the store cannot be created in it"
                raise StoreError(msg, "choose another folder with --store DIR") from error
        self._prepared = True

    # -- locks and temporary folders ---------------------------------------

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Take a named lock; logs that another build has it.

        The operating system drops the lock with its holder, also after ``kill -9``.
        """
        from filelock import FileLock, Timeout  # not needed by a build in which nothing changed

        self._prepare()
        lock = FileLock(self.root / "locks" / f"{name}.lock")
        with disk_errors(self.root):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                log.info(f"waiting for another build of {name}")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def temporary(self, hint: str) -> Iterator[Path]:
        """Yield a new folder in the store, so that renames out of it are atomic."""
        self._prepare()
        parent = self.root / "tmp"
        with disk_errors(self.root), flocked(parent, fcntl.LOCK_SH):
            path = Path(tempfile.mkdtemp(prefix=f"{_OURS}{hint}-", dir=parent))
            path.chmod(0o755)
            # the operating system drops it with this process
            held = os.open(path, os.O_RDONLY)
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)

    def sweep(self) -> int:
        """Remove folders of killed runs under tmp; returns their number."""
        parent = self.root / "tmp"
        gone = 0
        if not marker.marked(self.root):
            return gone
        # the exclusive lock: no other process is between making a folder and locking it
        with disk_errors(self.root), flocked(parent, fcntl.LOCK_EX) as here:
            ours = (path for path in parent.iterdir() if _TEMPORARY.fullmatch(path.name))
            for path in ours if here else ():
                with flocked(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as abandoned:
                    if abandoned:
                        _remove_abandoned(path)
                        gone += 1
        return gone

    def borrowed(self, root: Path, shared: Sequence[str] = _SHARED) -> Store:
        """Return a store in a new folder that shares stages which do not depend on a series.

        Args:
            shared: the folders, if fewer.

        Its other artefacts, and its records of the newest ones, are removed with the folder.
        """
        self._prepare()
        with disk_errors(root):
            root.mkdir(parents=True)
            marker.mark(root)
            for name in shared:
                (self.root / name).mkdir(parents=True, exist_ok=True)
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).symlink_to(self.root / name)
        return Store(root)

    # -- places --------------------------------------------------------------

    def download_path(self, sha256: str, name: str) -> Path:
        """Return the path of a verified file, present or not; name "": the folder of its hash."""
        return self.root / "downloads" / sha256 / name

    def partial_path(self, sha256: str) -> Path:
        """Return the file of a partial download, which the next run continues."""
        return self.root / "partial" / sha256

    def git_path(self, upstream: str) -> Path:
        """Return the bare repository of an upstream, present or not."""
        return self.root / "git" / f"{upstream}.git"

    def drop_repository(self, repository: Path) -> None:
        """Remove a damaged repository; its contents are fetched or made again.

        Raises:
            StoreError: it is not one of this store.
        """
        if repository.resolve().parent != (self.root / "git").resolve():
            raise StoreError(f"{repository}: damaged, and outside this store", "delete it by hand")
        with self.lock(f"git-{repository.name.removesuffix('.git')}"):
            self._discard(repository)

    def cache_path(self, name: str) -> Path:
        """Return the folder of a tool's own cache."""
        self._prepare()
        path = self.root / name
        with disk_errors(path):
            path.mkdir(exist_ok=True)
        return path

    @contextmanager
    def unpacked(self) -> Iterator[Path]:
        """Yield the folder of unpacked wheels, to one build at a time.

        The real path, also in a borrowed store, since uv compares names.
        """
        with self.lock("unpacked"):
            yield self.cache_path("unpacked").resolve()

    def verified(self, sha256: str, name: str) -> bool:
        """Return whether a download exists and its hash matches; removes a damaged one."""
        path = self.download_path(sha256, name)
        if not path.exists():
            return False
        if sha256_file(path) == sha256:
            return True
        log.warning(f"{path}: damaged in the store: fetching it again")
        path.unlink()
        return False

    def accept_download(self, partial: Path, sha256: str, name: str) -> Path:
        """Check a complete download and rename it to its place.

        Raises:
            IntegrityError: its hash differs from the pin; the file is removed.
        """
        found = sha256_file(partial)
        if found != sha256:
            partial.unlink()
            msg = f"{name}: sha256 is {found}, but {sha256} is pinned"
            remedy = (
                "the index or a proxy served another file than the pinned one: check its origin;"
                " if upstream changed it, update the hash in pins.yaml"
            )
            raise IntegrityError(msg, remedy)
        final = self.download_path(sha256, name)
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(final)
            final.chmod(0o444)  # not before: the next run must be able to continue a partial file
        return final

    # -- artefacts -----------------------------------------------------------

    def find(self, stage: str, inputs: Mapping[str, Any], kind: type[T]) -> Artefact[T] | None:
        """Return the finished artefact for these inputs, or None.

        Args:
            kind: type of its result; a record that does not load as it counts as absent.
        """
        return self._load(self.root / "artefacts" / stage / key_of(inputs)[:32], kind)

    def build(
        self,
        stage: str,
        inputs: Mapping[str, Any],
        kind: type[T],
        make: Callable[[Path], T],
        *,
        again: bool = False,
    ) -> Artefact[T]:
        """Return the artefact for these inputs, built if the store lacks it.

        Args:
            inputs: everything that determines the result; JSON values.
            kind: type of the result, a dataclass.
            make: fills the folder it is given and returns the result.
            again: make it even if present; the old one is kept until the new one is complete.

        If two builds need the same artefact at once, the second waits, then uses it.
        """
        key = key_of(inputs)
        final = self.root / "artefacts" / stage / key[:32]
        if not again and (found := self._load(final, kind)):
            return found
        with self.lock(f"{stage}-{key[:32]}"):
            if not again and (found := self._load(final, kind)):
                return found
            with self.temporary(stage) as work, disk_errors(self.root):
                start = time.monotonic()
                values = record(stage, inputs, make(work), time.monotonic() - start)
                (work / "artefact.json").write_text(json.dumps(values, indent=1, sort_keys=True))
                final.parent.mkdir(parents=True, exist_ok=True)
                if final.exists():  # the old one, or one whose record does not load
                    self._discard(final)
                work.rename(final)
        made = self._load(final, kind)
        assert made is not None
        return made

    def _discard(self, path: Path) -> None:
        # renamed first, so that no process finds half of it
        with self.temporary("discarded") as work, disk_errors(path):
            try:
                path.rename(work / "it")
            except FileNotFoundError:
                pass  # another build was faster

    def _load(self, path: Path, kind: type[T]) -> Artefact[T] | None:
        return load(kind, read_json(path / "artefact.json"), path)

    # -- inputs of the last build ------------------------------------

    def remember(self, target: str, label: str, artefact: Artefact[Any]) -> None:
        """Note an artefact as the newest of its label for a target (``explain`` reads it)."""
        newest = {"key": artefact.key, "inputs": artefact.inputs}
        self.write_json(self.root / "last" / target / f"{label}.json", newest)

    def last(self, target: str, label: str) -> Mapping[str, Any] | None:
        """Return ``{"key", "inputs"}`` of the newest artefact of a label, or None."""
        return _note(self.root / "last" / target / f"{label}.json")

    def write_json(self, path: Path, value: Any) -> None:
        """Write a small JSON file atomically, if its content differs."""
        text = json.dumps(value, indent=1, sort_keys=True) + "\n"
        if not path.exists() or path.read_bytes() != text.encode():  # a damaged one is no text
            self._prepare()
            write_file(path, text.encode())

    def clean(self, *, everything: bool) -> int:
        """Remove artefacts (and, with ``everything``, downloads and mirrors too).

        Returns:
            The bytes freed.

        Raises:
            StoreError: the folder is no store.
        """
        if not self._there():
            return 0
        self.sweep()
        names = (*_RESULTS, *_REST) if everything else _RESULTS
        freed = sum(self._remove(self.root / name) for name in names)
        self._prepared = False  # the next write creates the folders again
        return freed

    def clean_superseded(self) -> int:
        """Remove the artefacts that are not the newest of their name for any target.

        Returns:
            The bytes freed.

        Raises:
            StoreError: the folder is no store.
        """
        if not self._there():
            return 0
        self.sweep()
        notes = (_note(path) for path in (self.root / "last").rglob("*.json"))
        newest = {note["key"][:32] for note in notes if note is not None}
        doomed = [p for p in (self.root / "artefacts").glob("*/*") if p.name not in newest]
        # uv removes no wheel by itself: the newest environment is linked to its wheels
        return sum(self._remove(folder) for folder in [*doomed, self.root / "unpacked"])

    def _there(self) -> bool:
        """Return whether there is a store; cleaning creates none."""
        marker.refuse_others(self.root)
        return marker.marked(self.root)

    def _remove(self, folder: Path) -> int:
        """Remove a folder with its contents; returns the bytes freed, 0 if it is missing."""
        if not folder.is_dir():
            return 0
        # a file that is linked elsewhere, too (downloads, unpacked wheels), counts by its share
        found = (file.lstat() for file in folder.rglob("*"))
        freed = sum(stat.st_blocks * 512 // stat.st_nlink for stat in found)
        self._discard(folder)
        return freed


def _remove_abandoned(path: Path) -> None:
    """Remove a folder of a killed run, whose programs may write there for a moment more."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)


def _note(path: Path) -> Mapping[str, Any] | None:
    """Return ``{"key", "inputs"}`` of a file below ``last``; None: missing or damaged."""
    match read_json(path):
        case {"key": str(key), "inputs": dict(inputs)} as note if key_of(inputs) == key:
            return note
    return None
