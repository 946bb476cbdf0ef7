"""Download a model of the hub before the server starts.

vLLM's own download runs while it loads, so up to 65 GB of page cache compete with the weights. It
reports nothing to the health check, and gets a second copy of gpt-oss' weights where the hub's list
fails. Here a child downloads (fetching.py), and vLLM gets a folder. A complete snapshot is used
without a request to the hub.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.serving import access
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import EX_CANTCREAT, EX_CONFIG, EX_NOHOST, StartError
from sparkforge.serving.hubfiles import COMMIT, Place, cache
from sparkforge.serving.session import kill, start

PROGRAM = Path(__file__).with_name("fetching.py")
_SAY_EVERY_S = 15.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "ON", "YES", "TRUE")  # as the hub's library reads them
_RATE_OVER = 30  # readings, one a second
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StoppedError(Exception):
    """A signal came during the download; the downloaded part is kept. ``number`` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@dataclass(frozen=True)
class Snapshot:
    """One commit of a model, complete on this machine."""

    folder: Path
    """Has all files that vLLM reads."""
    commit: str


@dataclass
class Progress:
    """Follows the output of fetching.py, and reports the progress.

    Args:
        tell: passes progress to the health check, every second.
    """

    say: Callable[[str], None]
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    commit: str = ""
    error: str = ""
    code: int = EX_CONFIG
    last: str = ""
    _said: float = -_SAY_EVERY_S
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_OVER))

    def follow(self, lines: Iterable[bytes]) -> None:
        """Read until the program ends."""
        for line in lines:
            self.feed(line)

    def feed(self, line: bytes) -> None:
        """Read one line."""
        try:
            found = Document.parse("a line of the download", line)
            keys = found.get(dict).keys()
            if "done" in keys:
                self.commit = found.get(str, "done")
            elif "error" in keys:
                self.error, self.code = found.get(str, "error"), found.get(int, "code")
            elif "say" in keys:
                self.say(found.get(str, "say"))
            elif "waiting" in keys:
                self._show("waiting for another process that downloads this model")
            else:
                self._show(self._far(found.get(int, "have"), found.get(int, "total")))
        except DocumentError:  # a warning of a library, or the message of a crash
            self.last = access.shown(line.decode(errors="replace")) or self.last

    def _show(self, words: str) -> None:
        self.tell(words)
        if self.clock() - self._said >= _SAY_EVERY_S:
            self._said = self.clock()
            self.say(words)

    def _far(self, have: int, total: int) -> str:
        self._seen.append((self.clock(), have))
        (first_s, first), (now_s, now) = self._seen[0], self._seen[-1]
        unit = "GB" if total >= 1e9 else "MB"
        words = f"downloading {shown(have, total)} of {shown(total, total)} {unit}"
        if now_s - first_s < 2:
            return words
        rate = max(now - first, 0) / (now_s - first_s)
        words += f", {rate / 1e6:.1f} MB/s"
        return f"{words}, {_time((total - have) / rate)} left" if rate else words


def shown(count: int, total: int) -> str:
    """Return a number of bytes in the unit of the total, without the unit."""
    return f"{count / (1e9 if total >= 1e9 else 1e6):.{0 if total >= 1e10 else 1}f}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def fetch(
    model: str,
    revision: str,
    variables: Mapping[str, str],
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> Snapshot:
    """Return a model's files, downloading what is missing.

    Args:
        model: its name on the hub.
        revision: commit, branch or tag; empty: the newest.
        tell: passes progress to the health check.

    Raises:
        StartError: the model is not complete and cannot be downloaded. Code 68: the hub cannot be
            reached; 73: the files cannot be stored; 65: the hub sends other bytes than it lists;
            78: else.
        StoppedError: a signal came.
    """
    place = Place.of(cache(variables), model)
    here = place.commit(revision or "main")
    if COMMIT.fullmatch(revision) and place.complete(revision):
        return Snapshot(place.snapshot(revision), revision)
    there = place.complete(here) or place.seems_complete(here)
    if any(variables.get(name, "").upper() in _TRUE for name in _OFFLINE):
        if there:
            return Snapshot(place.snapshot(here), here)
        msg = (
            f"HF_HUB_OFFLINE is set, and {model} {f'at {revision} ' if revision else ''}is not"
            f" complete in {place.folder}: set HF_HUB_OFFLINE=0 in .env for one start, or run"
            " build.py model fetch"
        )
        raise StartError(msg)
    say(
        f"{model}{f' at {revision}' if revision else ''}: checking which files are missing in"
        f" {place.folder}"
    )
    progress = Progress(say, tell)
    words = [sys.executable, "-I", str(PROGRAM), str(cache(variables)), model, revision]
    ended = _run(words, variables, progress)
    if progress.commit:
        say(f"{model} is complete in {place.snapshot(progress.commit)}")
        return Snapshot(place.snapshot(progress.commit), progress.commit)
    if not progress.error:
        last = progress.last or "no output"
        msg = f"the download ended without a result (exit code {ended}): {last}"
        raise StartError(msg, EX_NOHOST)
    if progress.code in (EX_NOHOST, EX_CANTCREAT) and there:
        say(f"warning: {progress.error}")
        say(f"serving the downloaded files: {place.snapshot(here)}")
        return Snapshot(place.snapshot(here), here)
    raise StartError(progress.error, progress.code)


def _run(words: list[str], variables: Mapping[str, str], progress: Progress) -> int:
    quiet = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "error",
    }
    with _signals():
        child = start(words, {**variables, **quiet})
        try:
            assert child.stdout is not None
            progress.follow(child.stdout)
            return child.wait()
        finally:
            kill(child.pid)
            child.wait()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Raise StoppedError at a signal."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
