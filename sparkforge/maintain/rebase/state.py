"""What a rebase has done so far, on disk: one folder an upstream, one state file in it.

``dist/rebase/UPSTREAM/`` beside pins.yaml::

    state.json      this module's; replaced as a whole, so that it is old or new, never half
    tree/           the workspace of the upstream's own series
    tree-RIDER/     of another series that rides on its release files
    conflict/       while a patch is stopped: NAME.base, NAME.ours (the new release's), NAME.theirs
                    (the patch's)
    memory/         what was resolved here; goes beside the series when the rebase lands

The state names the commit that a patch became before the workspace moves to it, and a stop only
once the conflict stands there. So whatever kill -9 interrupts is done again from the state, and a
person's work is never thrown away.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparkforge.core import plain
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.errors import StoreError, UsageError
from sparkforge.maintain.rebase.resolutions import Conflict
from sparkforge.maintain.rebase.verdicts import Move
from sparkforge.pins.pins import Upstream
from sparkforge.sources.sources import Source

_VERSION = 2


@dataclass
class Leg:
    """One series on its way.

    Attributes:
        upstream: whose series.
        series: its digest when the rebase began.
        pinned: the upstream's pin when the rebase began, as JSON.
        goal: the upstream as pins.yaml will have it.
        old, new: the sources.
        moves: of the patches that are done, in order.
        stopped: the patch that waits for a person.
        conflict: what it met, as it was before anybody touched it.
    """

    upstream: str
    series: str
    pinned: Mapping[str, Any]
    goal: Upstream
    old: Source
    new: Source
    moves: list[Move] = field(default_factory=list)
    stopped: Move | None = None
    conflict: Conflict | None = None

    @property
    def head(self) -> str:
        """The commit that the moved patches have given so far."""
        commits = [move.commit for move in self.moves if move.commit is not None]
        return commits[-1] if commits else self.new.commit


@dataclass
class State:
    """A rebase under way.

    Attributes:
        word: what it was told to move onto.
        lacking: names of files that the index has none of for the new release.
        stated: what the release says its commit is.
        legs: the upstream's own series first.
    """

    upstream: str
    word: str
    lacking: tuple[str, ...]
    stated: str | None
    legs: list[Leg]

    @property
    def stopped(self) -> Leg | None:
        """The leg that waits for a person."""
        return next((leg for leg in self.legs if leg.stopped is not None), None)


class Job:
    """The folder of one upstream's rebase."""

    def __init__(self, root: Path, upstream: str) -> None:
        self.root = root
        self.folder = root / "dist" / "rebase" / upstream
        self.file = self.folder / "state.json"

    def tree(self, leg: Leg) -> Path:
        own = leg.upstream == self.folder.name
        return self.folder / ("tree" if own else f"tree-{leg.upstream}")

    @property
    def conflict(self) -> Path:
        return self.folder / "conflict"

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    def load(self) -> State | None:
        """Return the state of the rebase under way; None where there is none.

        Raises:
            StoreError: its file can't be read as one.
        """
        try:
            value = plain.json_of(self.file.read_text(encoding="utf-8"))
            return _state(value)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            msg = f"{self.file}: not the state of a rebase: {type(error).__name__}: {error}"
            raise StoreError(msg, "start again: build.py rebase UPSTREAM --abort") from None

    def save(self, state: State) -> None:
        """Replace the state file as a whole."""
        value = asdict(state)
        value["version"] = _VERSION
        for leg, shown in zip(state.legs, value["legs"], strict=True):
            # what is not given may be what may not be given: an empty folder, for one
            shown["goal"] = leg.goal.model_dump(mode="json", exclude_defaults=True)
            shown["moves"] = [move.as_json() for move in leg.moves]
            shown["stopped"] = leg.stopped and leg.stopped.as_json()
        write_file(self.file, json.dumps(value, indent=1, sort_keys=True, default=str).encode())

    def remove(self) -> None:
        """Remove all of it; a kill in between leaves no state that could be taken for one."""
        if not self.folder.exists():
            return
        with disk_errors(self.folder):
            gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=self.folder.parent))
            self.folder.rename(gone / "it")
            shutil.rmtree(gone)


def _state(value: dict[str, Any]) -> State:
    if value["version"] != _VERSION:
        msg = f"version {value['version']}"
        raise ValueError(msg)
    legs = []
    for leg in value["legs"]:
        sources = {
            side: Source(**{**leg[side], "repo": Path(leg[side]["repo"])})
            for side in ("old", "new")
        }
        legs.append(
            Leg(
                leg["upstream"],
                leg["series"],
                leg["pinned"],
                Upstream.model_validate(leg["goal"]),
                **sources,
                moves=[Move.from_json(move) for move in leg["moves"]],
                stopped=Move.from_json(leg["stopped"]) if leg["stopped"] else None,
                conflict=_conflict(leg["conflict"]),
            )
        )
    return State(value["upstream"], value["word"], tuple(value["lacking"]), value["stated"], legs)


def _conflict(value: dict[str, Any] | None) -> Conflict | None:
    if value is None:
        return None
    files, lines = tuple(value["files"]), tuple(value["lines"])
    return Conflict(value["key"], files, value["others"], lines)


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
