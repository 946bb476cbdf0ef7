"""Readings of a machine: taken live and recorded, or played back from a recording.

The checks read only through a ``Machine``, so a recording is enough to judge a remote machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparkforge.build import composing
from sparkforge.check.doctor.masking import is_secret_name
from sparkforge.core import plain
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.pins.types import MACHINES

_T = TypeVar("_T")
_TIMEOUT_S = 8.0
_PREFIXES = ("SPARKFORGE_", "NCCL_", "GLOO_", "HF_", "DOCKER_HOST")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclass(frozen=True)
class Access:
    """This user's access to a path; a missing path is ``writable`` if it can be created."""

    exists: bool
    writable: bool
    folder: bool


@dataclass(frozen=True)
class Disk:
    """The file system of a path: its device, and its free bytes."""

    device: int
    free: int


class Machine:
    """A machine's readings. State: those taken so far, by name.

    Args:
        root: the checkout.
        store: folder of the store.
        recorded: readings of ``recording``; None: read this machine.
    """

    def __init__(self, root: Path, store: Path, recorded: Mapping[str, Any] | None = None) -> None:
        self._recorded = recorded
        self._taken: dict[str, Future[Any]] = {}
        self.variables = self.value("variables", dict[str, str], lambda: variables(root)) or {}
        self.root = self.value("root", str, lambda: str(root)) or ""
        self.store = self.value("store", str, lambda: str(store)) or ""
        self.kernel = self.value("kernel", str, platform.release) or "unknown"
        machine = self.value("machine", str, platform.machine) or "unknown"
        self.platform = MACHINES.get(machine, machine)
        self.in_pair = bool(self.variables.get("SPARKFORGE_CLUSTER_ROLE"))

    def value(self, name: str, kind: type[_T], read: Callable[[], _T | None]) -> _T | None:
        """Return a reading, taken once; None if it failed, or the recording lacks it."""
        mine: Future[Any] = Future()
        found = self._taken.setdefault(name, mine)
        if found is mine:
            value = None
            try:
                if self._recorded is None:
                    value = read()
                elif name in self._recorded:
                    value = plain.load(kind, self._recorded[name], exact=False)
            except OSError:  # missing or unreadable
                pass
            finally:
                mine.set_result(value)
        result: _T | None = found.result()
        return result

    def text(self, path: str) -> str:
        """Return a file's text, stripped; "" if it is missing or unreadable."""

        def read() -> str:
            with Path(path).open("rb") as file:
                return file.read(1 << 20).decode(errors="replace")

        return (self.value(path, str, read) or "").strip()

    def run(self, *words: str) -> Glimpse:
        """Return a program's output; it has some seconds."""
        line = f"$ {shlex.join(words)}"
        found = self.value(line, Glimpse, lambda: glimpse(*words, timeout_s=_TIMEOUT_S))
        return found or Glimpse(None, problem=f"{words[0]} was not read")

    def access(self, path: str | Path) -> Access:
        """Return this user's access to a path."""

        def read() -> Access:
            near = _existing(Path(path))
            writable = os.access(near, os.W_OK | (os.X_OK if near.is_dir() else 0))
            return Access(near == Path(path), writable, near.is_dir())

        return self.value(f"access {path}", Access, read) or Access(False, False, False)

    def disk(self, path: str) -> Disk | None:
        """Return the file system that has a path, or would have it."""

        def read() -> Disk:
            near = _existing(Path(path))
            return Disk(near.stat().st_dev, shutil.disk_usage(near).free)

        return self.value(f"disk {path}", Disk, read)

    def recording(self) -> dict[str, Any]:
        """Return the readings as JSON values."""
        done = {name: one.result() for name, one in self._taken.copy().items() if one.done()}
        return {name: plain.as_json(value) for name, value in sorted(done.items())}


def load(text: str) -> Mapping[str, Any]:
    """Return a recording; ValueError if the text is none."""
    found = plain.json_of(text)
    if not isinstance(found, dict) or not isinstance(found.get("machine"), str):
        raise ValueError("it has no readings of a machine")
    return found


def variables(root: Path) -> dict[str, str]:
    """Return the variables that the checks need, none of them a secret."""
    return {
        name: value
        for name, value in composing.seen(root / ".env").items()
        if (name.startswith(_PREFIXES) or name.lower() in _PROXIES) and not is_secret_name(name)
    }


def expanded(folder: str) -> Path:
    """Return a folder with its ~ expanded; unchanged for a user that does not exist."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return Path(folder)


def first_line(seen: Glimpse) -> str:
    """Return the first line of a program's output, or the reason why it failed."""
    text = seen.out if seen.code == 0 else seen.err + seen.out
    return seen.problem or text.strip().partition("\n")[0][:120] or f"exit code {seen.code}"


def json_of(seen: Glimpse) -> Any:
    """Return a program's output as JSON; None if it is not JSON."""
    try:
        return plain.json_of(seen.out)
    except ValueError:
        return None


def _existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
