"""Readings of a machine, and what a check of doctor is."""

import platform
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sparkforge.build import composing
from sparkforge.build.context import profile_of
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.pins.pins import ModelPin, Pins, Target
from sparkforge.pins.types import MACHINES
from sparkforge.serving.options import SECRET_NAME
from sparkforge.serving.profile import Profile

_T = TypeVar("_T")
_TIMEOUT_S = 8.0
State = Literal["ok", "warning", "error", "not checked"]
"""``error``: the target cannot be built or served; ``warning``: it may fail."""
Need = Literal["", "platform", "gpu", "pack", "image", "model"]
"""A machine of the target's platform; on it, a target with one of these."""


@dataclass(frozen=True)
class Finding:
    """Result of a check; ``hint``: a command, mostly; ``judge`` sets the name."""

    state: State
    seen: str
    hint: str = ""
    name: str = ""


ok, warning = partial(Finding, "ok"), partial(Finding, "warning")
error, unseen = partial(Finding, "error"), partial(Finding, "not checked")


@dataclass(frozen=True)
class Want:
    """The target that a machine is judged for, and its pinned model, or None."""

    name: str
    target: Target
    profile: Profile
    model: ModelPin | None


def want_of(pins: Pins, name: str) -> Want:
    """Return what a target wants; UsageError if there is no such target."""
    target = pins.target(name)
    model = pins.models[target.model] if target.model else None
    return Want(name, target, profile_of(pins, name), model)


class Machine:
    """This machine; ``taken`` has its readings so far, for an archive: JSON values."""

    def __init__(self, root: Path, store: Path) -> None:
        self.taken: dict[str, Any] = {}
        self.root, self.store = root, str(store)
        self.variables = self.value("variables", self._variables) or {}
        machine = self.value("machine", platform.machine) or "unknown"
        self.platform = MACHINES.get(machine, machine)

    def _variables(self) -> dict[str, str]:
        """Return the variables that the checks need, none of them a secret."""
        return {
            name: value
            for name, value in composing.seen(self.root / ".env").items()
            if re.match("SPARKFORGE_|NCCL_|GLOO_|HF_|DOCKER_HOST$", name)
            and not re.search(SECRET_NAME, name, re.IGNORECASE)
        }

    def value(self, name: str, read: Callable[[], _T | None]) -> _T | None:
        """Return a reading, taken once; None if it failed."""
        if name not in self.taken:
            self.taken[name] = None
            with suppress(OSError):  # missing or unreadable
                self.taken[name] = read()
        found: _T | None = self.taken[name]
        return found

    def text(self, path: str) -> str:
        """Return a file's text; "" if it is missing or unreadable."""
        return self.value(path, lambda: Path(path).read_text(errors="replace")) or ""

    def run(self, *words: str) -> Glimpse:
        """Return a program's output; it has some seconds."""
        line = f"$ {shlex.join(words)}"
        found = self.value(line, lambda: asdict(glimpse(*words, timeout_s=_TIMEOUT_S)))
        return Glimpse(**(found or {"code": None, "problem": f"{words[0]}: cannot be started"}))

    def first_line(self, *words: str) -> str:
        """Return the first line of a program's output, or the reason why it failed."""
        seen = self.run(*words)
        text = seen.out if seen.code == 0 else seen.err + seen.out
        return seen.problem or text.strip().partition("\n")[0][:120] or f"exit code {seen.code}"

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder that this user may know of."""
        return bool(self.value(f"exists {path}", Path(path).exists))

    def disk(self, path: str) -> tuple[int, int] | None:
        """Return the device that a path is on, or would be, and its free bytes."""

        def read() -> tuple[int, int]:
            folders = (folder for folder in (Path(path), *Path(path).parents) if folder.exists())
            near = next(folders, Path("/"))
            return near.stat().st_dev, shutil.disk_usage(near).free

        return self.value(f"disk {path}", read)


Function = Callable[[Machine, Want], Finding | list[Finding] | None]
"""A check; None: it does not concern this machine, or another check reports it."""
CHECKS: dict[str, tuple[Need, Function]] = {}
"""The checks by name, in their order."""


def check(need: Need = "") -> Callable[[Function], Function]:
    """Register a function as a check of its name; its docstring is the reason for it."""

    def register(run: Function) -> Function:
        CHECKS[run.__name__.strip("_").replace("_", "-")] = need, run
        return run

    return register
