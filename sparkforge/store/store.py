"""The store: downloads, git repositories and finished results; the only module that touches it.

``artefacts/STAGE/KEY/`` has finished results, ``last/TARGET/LABEL.json`` the inputs of a target's
newest build, ``tmp/NAME`` work in progress with ``NAME.lock``, and ``unpacked`` and ``serve`` the
caches of uv and of servers. Nothing gets its final name before it is complete and checked, so
``kill -9`` at any point leaves only files under ``partial`` and ``tmp``.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkforge.core import disk, plain
from sparkforge.core.disk import disk_errors, key_of, read_json, sha256_file, write_file
from sparkforge.core.errors import IntegrityError, StoreError
from sparkforge.core.log import log

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

INTERPRETERS = "interpreters"
_RESULTS = ("artefacts", "last", "unpacked")
# of ``smoke`` a borrowed store uses only the unpatched release
_SHARED = (
    *("downloads", "partial", "git", "locks", "unpacked", INTERPRETERS),
    *(f"artefacts/{name}" for name in ("intake", "sources", "kernels", "wheelhouse", "smoke")),
)
TAG = "CACHEDIR.TAG"
_OURS = "# This folder is sparkforge's store"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    f"{_OURS}; it can be deleted, the next build fills it again.\n"
).encode()
_ROOT = Path(__file__).parents[1]
_BUILD = (
    *("core", "store", "pins", "sources", "series", "wheels"),
    *("runtime", "checkpoints", "build"),
)


def code_of(module: str) -> str:
    """Return the digest of all code of the build, and of a module's folder outside of it."""
    folder = module.split(".")[1:-1]
    more = () if not folder or folder[0] in _BUILD else ("/".join(folder),)
    return _digest(*_BUILD, *more)


@cache
def _digest(*folders: str) -> str:
    found = (p for folder in folders for p in sorted((_ROOT / folder).rglob("*")) if p.is_file())
    return disk.code_digest(*(p for p in found if ".pyc" not in p.name))  # written as .pyc.123


@dataclass(frozen=True)
class Artefact(Generic[T_co]):
    """A finished result; ``key``: sha256 of ``inputs``; ``seconds`` that making it took."""

    key: str
    inputs: Mapping[str, Any]
    result: T_co
    path: Path
    seconds: float


def place(stage: str, inputs: Mapping[str, Any]) -> str:
    """Return the folder of an artefact, relative to its store."""
    return f"artefacts/{stage}/{key_of(inputs)[:32]}"


def _seal(values: Mapping[str, Any]) -> str:
    """Return the sha256 of a record, which reveals damage."""
    return key_of({name: value for name, value in values.items() if name != "seal"})


class Store:
    """Access to one store folder; made on first use."""

    def __init__(self, root: Path, remote: str | None = None) -> None:
        """``remote``: URL of another store, to read from; None, too, once it does not answer."""
        self.root, self.remote = root, remote

    def _prepare(self) -> None:
        """Create the folders; called before a write, so that a dry run leaves no trace."""
        with disk_errors(self.root):
            if not self._marked():
                write_file(self.root / TAG, _TAG_TEXT)  # before what it explains
            for name in ("downloads", "partial", "git", "artefacts", "last", "tmp", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)

    def _marked(self) -> bool:
        """Return whether the folder is a store; StoreError if it is something else's."""
        tag = self.root / TAG
        # written aside first, by another build too; a fresh file system has a folder of its own
        ignored = ("lost+found", f".{TAG}")
        others = [one.name for one in self.root.glob("*") if not one.name.startswith(ignored)]
        # read last: another build that makes this store writes it before anything else
        if tag.is_file() and _OURS in tag.read_text(errors="replace"):
            return True
        if others:
            msg = f"{self.root}: is not a sparkforge store, and contains {others[0]}"
            raise StoreError(msg, "give an empty or new folder with --store DIR")
        return False

    @contextmanager
    def in_use(self, kind: int = fcntl.LOCK_SH) -> Iterator[None]:
        """Keep ``clean``, which holds it alone, out of the store; builds share it."""
        self._prepare()
        with (self.root / TAG).open() as tag:
            try:
                fcntl.flock(tag, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("  waiting for builds, or a clean, of this store")
                fcntl.flock(tag, kind)
            yield

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Take a named lock, which the operating system drops with its holder."""
        from filelock import FileLock, Timeout  # not needed by a build in which nothing changed

        self._prepare()
        lock = FileLock(self.root / "locks" / f"{name}.lock")
        try:
            taken = lock.acquire(timeout=0)
        except Timeout:
            log.info(f"waiting for another build of {name}")
            taken = lock.acquire()
        with taken:
            yield

    @contextmanager
    def temporary(self, hint: str) -> Iterator[Path]:
        """Yield a new folder in the store, so that renames out of it are atomic."""
        from filelock import FileLock

        self._prepare()
        path = self.root / "tmp" / f"sparkforge-{hint}-{secrets.token_hex(4)}"
        with FileLock(path.with_name(f"{path.name}.lock")) as lock:
            try:
                path.mkdir()
                path.chmod(0o755)  # whatever the umask
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
                Path(lock.lock_file).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove folders of killed runs under tmp."""
        ours = (self.root / TAG).is_file()
        for lock in (self.root / "tmp").glob("sparkforge-*.lock") if ours else ():
            from filelock import FileLock, Timeout

            with suppress(Timeout), FileLock(lock, timeout=0):  # else it is at work
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink(missing_ok=True)

    def borrowed(self, root: Path, shared: Sequence[str] = _SHARED) -> Store:
        """Return a store in a new folder that shares what does not depend on a series."""
        self._prepare()
        write_file(root / TAG, _TAG_TEXT)
        for name in shared:
            (self.root / name).mkdir(parents=True, exist_ok=True)
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(self.root / name)
        return Store(root)

    def download_path(self, sha256: str, name: str) -> Path:
        """Return the path of a verified file, present or not; name "": the folder of its hash."""
        return self.root / "downloads" / sha256 / name

    def partial_path(self, sha256: str) -> Path:
        """Return the file of a partial download, which the next run continues."""
        return self.root / "partial" / sha256

    def git_path(self, upstream: str) -> Path:
        """Return the bare repository of an upstream, present or not."""
        return self.root / "git" / f"{upstream}.git"

    def cache_path(self, name: str) -> Path:
        """Return the folder of a tool's own cache."""
        self._prepare()
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path

    @contextmanager
    def unpacked(self) -> Iterator[Path]:
        """Yield the folder of unpacked wheels, to one build at a time."""
        with self.lock("unpacked"):
            yield self.cache_path("unpacked").resolve()  # uv compares names

    def verified(self, sha256: str, name: str) -> bool:
        """Return whether a download exists and its hash matches; removes a damaged one."""
        path = self.download_path(sha256, name)
        if path.exists() and sha256_file(path) != sha256:
            log.warning(f"{path}: damaged in the store: fetching it again")
            path.unlink()
        return path.exists()

    def accept_download(self, partial: Path, sha256: str, name: str) -> Path:
        """Check a complete download and rename it to its place."""
        found = sha256_file(partial)
        if found != sha256:
            partial.unlink()
            msg = f"{name}: sha256 is {found}, not {sha256}"
            raise IntegrityError(msg, "the index or a proxy served another file: check its origin")
        final = self.download_path(sha256, name)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(final)
        final.chmod(0o444)  # not before: the next run must be able to continue a partial file
        return final

    def find(self, stage: str, inputs: Mapping[str, Any], kind: type[T]) -> Artefact[T] | None:
        """Return the finished artefact for these inputs, or None.

        A record with a wrong seal, or of a result of another type, counts as absent.
        """
        return self.read(self.root / place(stage, inputs), kind)

    @staticmethod
    def read(path: Path, kind: type[T]) -> Artefact[T] | None:
        """Return the artefact in a folder; as ``find``."""
        made = read_json(path / "artefact.json") or {}
        result = plain.load(kind, made.get("outputs")) if made.get("seal") == _seal(made) else None
        if result is None:
            return None
        key, inputs = made.get("key", ""), made.get("inputs", {})
        return Artefact(key, inputs, result, path, made.get("seconds", 0))

    def build(
        self,
        stage: str,
        inputs: Mapping[str, Any],
        kind: type[T],
        make: Callable[[Path], T],
        *,
        again: bool = False,
    ) -> Artefact[T]:
        """Return the artefact for these inputs, built if the store lacks it, by one build at once.

        ``inputs`` are all that determines the result. ``make`` fills the folder that it is given.
        ``again``: make it even if present; the old one is kept until the new one is complete.
        """
        final = self.root / place(stage, inputs)
        with self.lock(f"{stage}-{final.name}"):
            if not again and (found := self.find(stage, inputs, kind)):
                return found
            with self.temporary(stage) as work, disk_errors(self.root):
                start = time.monotonic()
                result = make(work)
                seconds = round(time.monotonic() - start, 3)
                made: dict[str, Any] = {"stage": stage, "key": key_of(inputs), "inputs": inputs}
                made |= {"outputs": plain.as_json(result), "seconds": seconds}
                text = json.dumps({**made, "seal": _seal(made)}, indent=1, sort_keys=True)
                (work / "artefact.json").write_text(text)
                final.parent.mkdir(parents=True, exist_ok=True)
                if final.exists():  # the old one, or one whose record does not load
                    self._discard(final)
                work.rename(final)
        return Artefact(key_of(inputs), inputs, result, final, seconds)

    def remember(self, target: str, label: str, artefact: Artefact[Any]) -> None:
        """Note an artefact as the newest of its label for a target (``explain`` reads it)."""
        note = {"key": artefact.key, "inputs": artefact.inputs}
        if self.last(target, label) != note:
            self._prepare()
            text = json.dumps(note, indent=1, sort_keys=True) + "\n"
            write_file(self.root / "last" / target / f"{label}.json", text.encode())

    def last(self, target: str, label: str) -> Mapping[str, Any] | None:
        """Return ``{"key", "inputs"}`` of the newest artefact of a label, or None."""
        note = read_json(self.root / "last" / target / f"{label}.json") or {}
        whole = isinstance(note.get("key"), str) and isinstance(note.get("inputs"), dict)
        return note if whole else None

    def clean(self, *, superseded: bool = False) -> int:
        """Remove all results once no build is at work; returns the bytes freed.

        ``superseded``: only results that are not the newest of their label for any target.
        """
        if not self._marked():
            return 0
        with self.in_use(fcntl.LOCK_EX):
            self.sweep()
            doomed = [self.root / name for name in _RESULTS]
            if superseded:
                notes = (read_json(path) or {} for path in (self.root / "last").rglob("*.json"))
                newest = {str(note.get("key"))[:32] for note in notes}
                doomed = [p for p in (self.root / "artefacts").glob("*/*") if p.name not in newest]
                # uv removes no wheel by itself: the newest environment is linked to its wheels
                doomed.append(self.root / "unpacked")
            freed = 0
            for folder in filter(Path.is_dir, doomed):
                # a file that is linked elsewhere, too, counts by its share
                found = (file.lstat() for file in folder.rglob("*"))
                freed += sum(stat.st_blocks * 512 // stat.st_nlink for stat in found)
                self._discard(folder)
            return freed

    def _discard(self, path: Path) -> None:
        # renamed first, so that no process finds half of it
        with self.temporary("discarded") as work:
            path.rename(work / "it")
