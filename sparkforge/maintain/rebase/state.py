"""State of a rebase on disk: one folder per upstream, with one state file.

``dist/rebase/UPSTREAM/`` next to pins.yaml::

    state.json      this module's; replaced as a whole, so it is old or new, never partial
    tree/           the workspace of the upstream's own series
    tree-NAME/      of another series, whose sources are among its release files, or a companion's
    conflict/       while a patch is stopped: NAME.base, NAME.ours (the new release's), NAME.theirs
                    (the patch's)
    memory/         resolutions made here; moved to the series when the rebase lands
    checkout/       with companions: the throw-away checkout in which all of it is tried
    locked.json     with companions: the locks that were made for it

The state names a patch's new commit before the workspace moves to it, and a stop only once the
conflict is there. So a step that kill -9 interrupts is done again from the state, and a person's
work is never lost.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import PlainSerializer

from sparkforge.core import plain, typed
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import StoreError, UsageError
from sparkforge.maintain.rebase.resolutions import Conflict
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.pins.pins import Upstream
from sparkforge.sources.sources import Source


def _given(pin: Upstream) -> dict[str, Any]:
    """Return the values that a pin has: a default need not be a value that pins.yaml may have."""
    return pin.model_dump(mode="json", exclude_defaults=True)


@dataclass
class SeriesRebase:
    """One series on its way."""

    upstream: str
    """The upstream of the series."""
    series: str
    """Its digest when the rebase began."""
    pinned: Mapping[str, Any]
    """The upstream's pin when the rebase began, as JSON."""
    target: Annotated[Upstream, PlainSerializer(_given)]
    """The upstream as pins.yaml will have it."""
    old: Source
    new: Source
    """``old``, ``new``: the sources."""
    lacking: tuple[str, ...] = ()
    """Names of files for which the index has none of the new release."""
    declared_commit: str | None = None
    """The commit that the release names."""
    amended: str | None = None
    """The commit that a person made of the moved patches, after a trial that failed."""
    results: list[PatchResult] = field(default_factory=list)
    """Of the patches that are done, in order."""
    stopped: PatchResult | None = None
    """The patch that waits for a person."""
    conflict: Conflict | None = None
    """Its conflict, in its original form."""

    @property
    def head(self) -> str:
        """The commit that the moved patches have given so far."""
        if self.amended is not None:
            return self.amended
        commits = [result.commit for result in self.results if result.commit is not None]
        return commits[-1] if commits else self.new.commit


@dataclass
class State:
    """A rebase in progress."""

    upstream: str
    spec: str
    """The requested release (``--onto``)."""
    parts: list[SeriesRebase]
    """The upstream's own series first."""
    companions: bool = False
    """What the release demands moves, too, and all of it is tried before it lands."""
    tried: bool = False
    """A trial failed: a person may have amended the moved patches since."""

    @property
    def moved(self) -> dict[str, Upstream]:
        """The upstreams that get another release, as pins.yaml will have them."""
        return {part.upstream: part.target for part in self.parts if not part.target.source_in}

    @property
    def stopped(self) -> SeriesRebase | None:
        """The part that waits for a person."""
        return next((part for part in self.parts if part.stopped is not None), None)


class Job:
    """The folder of one upstream's rebase."""

    def __init__(self, root: Path, upstream: str) -> None:
        self.root = root
        self.folder = root / "dist" / "rebase" / upstream
        self.file = self.folder / "state.json"

    def tree(self, part: SeriesRebase) -> Path:
        own = part.upstream == self.folder.name
        return self.folder / ("tree" if own else f"tree-{part.upstream}")

    @property
    def conflict(self) -> Path:
        return self.folder / "conflict"

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    def load(self) -> State | None:
        """Return the state of the rebase in progress; None if there is none.

        Raises:
            StoreError: its file cannot be read, or another version wrote it.
        """
        try:
            state = typed.load(State, plain.json_of(self.file.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, OSError) as error:
            return self._invalid(f": {error}")
        return state or self._invalid(" of this version of sparkforge")

    def _invalid(self, why: str) -> NoReturn:
        msg = f"{self.file}: not the state of a rebase{why}"
        raise StoreError(msg, "start again: build.py rebase UPSTREAM --abort") from None

    def save(self, state: State) -> None:
        """Replace the state file as a whole."""
        text = json.dumps(typed.as_json(state), indent=1, sort_keys=True)
        write_file(self.file, text.encode())

    def remove(self) -> None:
        """Remove all of it; a kill in between leaves no valid state."""
        if not self.folder.exists():
            return
        with disk_errors(self.folder):
            gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=self.folder.parent))
            self.folder.rename(gone / "it")
            shutil.rmtree(gone)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the one lock of a checkout's rebases: they all write pins.yaml.

    Raises:
        UsageError: another rebase is running in this checkout.
    """
    from filelock import FileLock, Timeout

    folder = root / "dist" / "rebase"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            msg = f"{root}: another rebase is running in this checkout"
            raise UsageError(msg, "wait for it, or stop it") from None
    try:
        for left in folder.glob(".gone-*"):  # of an --abort that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()
