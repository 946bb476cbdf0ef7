"""Program of the image that downloads one commit of a model into the hub's cache.

    python -I fetching.py CACHE MODEL REVISION

It prints one JSON document on each line: ``{"say": TEXT}``; ``{"have": BYTES, "total": BYTES}``
every second; ``{"waiting": true}`` while another process downloads into the folder; and at the end
``{"done": COMMIT}`` or ``{"error": TEXT, "code": EXIT CODE}``.

A partly downloaded file (``blobs/HASH.incomplete``) continues with a range request, and gets its
name after its hash has been checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

# run by its path, with -I: the folder that holds the package is not searched
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sparkforge.serving import durable
from sparkforge.serving.access import shown
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, StartError
from sparkforge.serving.hubfiles import COMMIT, Listed, Place, is_plain, size
from sparkforge.serving.hubpart import Part, WrongBytesError

if TYPE_CHECKING:
    from sparkforge.serving.hubclient import Hub

_AT_ONCE = 4  # files; one connection rarely fills a fast line
_output = threading.Lock()


def tell(**words: object) -> None:
    """Print one document for the entrypoint."""
    with _output:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


class _Download:
    """The files of one commit, several at once."""

    def __init__(self, hub: Hub, place: Place, commit: str, files: list[Listed]) -> None:
        self._hub, self._place, self._commit, self._files = hub, place, commit, files
        self._parts: dict[str, Part] = {}
        self._lock = threading.Lock()
        self._present = 0
        self.total = sum({file.digest: file.size for file in files}.values())

    def have(self) -> int:
        """Return the number of bytes on this machine."""
        with self._lock:
            return self._present + sum(file.size for file in self._parts.values())

    def run(self) -> None:
        """Download all missing files; StartError if they cannot be downloaded or stored."""
        lacking = self._place.lacking(self._commit, self._files)
        wanted = [
            file
            for file in {file.digest: file for file in lacking}.values()
            if size(self._place.blob(file.digest)) != file.size
        ]
        self._present = self.total - sum(file.size for file in wanted)
        for name in ("blobs", f"snapshots/{self._commit}"):
            (self._place.folder / name).mkdir(parents=True, exist_ok=True)
        self._check_room(wanted)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            # the largest first, so that no single one is left for the end
            wanted.sort(key=lambda file: file.size, reverse=True)
            running: list[Future[None]] = [pool.submit(self._bring, file) for file in wanted]
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            failed = next((error for future in done if (error := future.exception())), None)
            if failed is not None:
                # the others could run for hours; their parts are kept
                self._hub.stopped.set()
                pool.shutdown(cancel_futures=True)
                if isinstance(failed, OSError) and failed.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._no_room(self.total - self.have())
                raise failed
        for file in lacking:
            self._link(file)

    def _check_room(self, wanted: list[Listed]) -> None:
        needed = sum(file.size for file in wanted)
        needed -= sum(min(max(size(self._part(file)), 0), file.size) for file in wanted)
        if needed > _free(self._place.folder):
            raise self._no_room(needed)

    def _no_room(self, needed: int) -> StartError:
        folder = self._place.folder
        msg = (
            f"the disk is full: {_bytes(needed)} of the model are missing in {folder}, and"
            f" {_bytes(_free(folder))} are free; free some space, and the next start continues"
        )
        return StartError(msg, EX_CANTCREAT)

    def _part(self, file: Listed) -> Path:
        return self._place.blob(f"{file.digest}.incomplete")

    def _bring(self, file: Listed) -> None:
        path = self._part(file)
        part = Part(path, file)
        with self._lock:
            self._parts[file.digest] = part
        try:
            kept = part.kept
            self._fill(part)
            if (
                not part.is_right() and kept
            ):  # the earlier part was damaged: try once from the start
                tell(say=f"{file.path}: the earlier part is damaged; downloading it again")
                part.restart()
                self._fill(part)
            if not part.is_right():
                part.restart()
                raise WrongBytesError(f"{file.path} does not have the hash that the hub lists")
            part.sync()
        finally:
            part.close()
        path.replace(self._place.blob(file.digest))

    def _fill(self, part: Part) -> None:
        try:
            self._hub.download(self._commit, part)
        except WrongBytesError:
            if part.kept:  # is_right() fails, and a second attempt follows
                return
            part.restart()
            raise

    def _link(self, file: Listed) -> None:
        """Link a blob into the snapshot, replacing an existing file."""
        name = self._place.snapshot(self._commit) / file.path
        fresh = name.with_name(f".{file.digest}.{os.getpid()}")
        fresh.symlink_to(os.path.relpath(self._place.blob(file.digest), name.parent))
        fresh.replace(name)


def _free(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def failure(error: BaseException, place: Place) -> tuple[str, int]:
    """Return the message of a failure, and its exit code."""
    if isinstance(error, StartError):
        return str(error), error.code
    if isinstance(error, WrongBytesError):
        text = (
            f"a downloaded file was wrong and has been removed: {shown(error)}; check HTTPS_PROXY"
        )
        return f"{text} and HF_ENDPOINT, since a proxy or a mirror may have changed it", EX_DATAERR
    if isinstance(error, OSError):
        text = f"the model cannot be stored in {place.folder}: {error.strerror or error}"
        return (
            f"{shown(text)}; user {os.getuid()} must be allowed to write there (docs/serving.md)",
            EX_CANTCREAT,
        )
    return f"the download failed: {type(error).__name__}: {shown(error)}", EX_CONFIG


@contextlib.contextmanager
def alone(place: Place) -> Iterator[None]:
    """Lock the model's folder, once no other process downloads into it.

    The kernel drops the lock with its holder, also after a kill.
    """
    place.lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tell(waiting=True)
                time.sleep(1)
        yield
    finally:
        os.close(handle)


def fetch(cache: Path, model: str, revision: str) -> str:
    """Download a model; returns its commit.

    Args:
        revision: commit, branch or tag; empty: the newest.

    Raises:
        StartError, OSError: it cannot be downloaded or stored.
    """
    from sparkforge.serving.hubclient import Hub  # here, so that a missing library is a message

    revision = revision or "main"
    if not is_plain(revision):
        raise StartError(
            f"SPARKFORGE_MODEL_REVISION is {revision[:100]!r}, which is not a revision"
        )
    hub, place = Hub(model), Place.of(cache, model)
    with alone(place):
        commit = revision if COMMIT.fullmatch(revision) else hub.commit(revision)
        # another process may have downloaded it while this one waited
        if not place.complete(commit):
            files = hub.files(commit)
            download = _Download(hub, place, commit, files)
            with telling(download):
                download.run()
            place.record(commit, files)
        if commit != revision:
            place.ref(revision).parent.mkdir(parents=True, exist_ok=True)
            durable.replace(place.ref(revision), commit)
    return commit


@contextlib.contextmanager
def telling(download: _Download) -> Iterator[None]:
    """Report the progress every second."""
    over = threading.Event()

    def tell_on() -> None:
        while not over.wait(1):
            tell(have=download.have(), total=download.total)

    thread = threading.Thread(target=tell_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(arguments: list[str]) -> int:
    """Run as a program; returns the exit code."""
    # end with the entrypoint: alone this process would keep the folder locked
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    cache, model, revision = arguments
    try:
        commit = fetch(Path(cache), model, revision)
    except Exception as error:
        text, code = failure(error, Place.of(Path(cache), model))
        tell(error=text, code=code)
        return code
    tell(done=commit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
