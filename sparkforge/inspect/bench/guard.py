"""The guard of a measurement: other load on the machine, and a GPU that slows down.

It reads the machine before and after each test, when the server is idle, and during it. A value
that the machine does not report counts as unknown, not as good or bad.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from sparkforge.core.run import glimpse
from sparkforge.inspect.doctor.gpu import low_clock, slowed_by, text_of, tree_of

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE_S = 1.0  # of /proc/stat, whose unit is 0.01 s
_EVERY_S = 5.0  # nvidia-smi costs some 0.1 s of a core
_SMI_S = 20.0
_CORES, _SHARE = 0.5, 0.05  # limit for other programs' use of the CPU: the larger of both
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, and steal (a hypervisor's)


def smi() -> ET.Element | None:
    """Return nvidia-smi's report; None without a GPU."""
    return tree_of(glimpse("nvidia-smi", "-q", "-x", timeout_s=_SMI_S))


@dataclass(frozen=True)
class Times:
    """Seconds of CPU since the machine's start: of all programs, and of our processes."""

    all: float
    ours: float


def times(proc: Path = _PROC, pid: int | None = None) -> Times | None:
    """Return the CPU's times; None if /proc lacks them.

    Ours are this process and its descendants, which include a server that it started.
    """
    try:
        fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(fields[i]) for i in _BUSY if i < len(fields)) / _TICKS
    except (OSError, ValueError):
        return None
    parents: dict[int, list[int]] = {}
    own: dict[int, float] = {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            # the name in brackets may have spaces
            after = path.read_text(errors="replace").rpartition(")")[2].split()
            process = int(path.parent.name)
            parents.setdefault(int(after[1]), []).append(process)
            # includes the times of ended children
            own[process] = sum(map(int, after[11:15])) / _TICKS
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    todo, ours = [os.getpid() if pid is None else pid], 0.0
    while todo:
        process = todo.pop()
        ours += own.get(process, 0.0)
        todo += parents.get(process, [])
    return Times(busy, ours)


@dataclass
class Guard:
    """Guard of a measurement. State: the disturbances so far.

    Attributes:
        ours: we started the server's process, so its CPU time is known to be ours.
        disturbed: the disturbances, as sentences.
    """

    ours: bool
    read_times: Callable[[], Times | None] = times
    read_smi: Callable[[], ET.Element | None] = smi
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    disturbed: list[str] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    @property
    def limit(self) -> float:
        """Limit for other programs' use of the CPU, in cores."""
        return max(_CORES, _SHARE * self.cores)

    def before_start(self) -> None:
        """Look for programs that use the GPU before our server starts."""
        self._note_gpu_users("before the start", self.read_smi(), ())

    def quiet(self, when: str) -> None:
        """Check the machine while the server is idle."""
        before, start = self.read_times(), self.clock()
        self.sleep(_IDLE_S)
        after, took = self.read_times(), self.clock() - start
        if before is not None and after is not None:
            self._note_load(when, (after.all - before.all) / took)
        tree = self.read_smi()
        self._known = set(_users(tree))
        if not self.ours and len(self._known) > 1:
            self._add(f"{when}: {len(self._known)} programs use the GPU: {_named(_users(tree))}")
        self._note_slow(when, tree)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Watch the machine during the block."""
        before, start = self.read_times(), self.clock()
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(what, done), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join(_SMI_S + 5)
        after, took = self.read_times(), self.clock() - start
        if self.ours and before is not None and after is not None and took > 0:
            ours = after.ours - before.ours
            self._note_load(what, (after.all - before.all - ours) / took)

    def _watch(self, what: str, done: threading.Event) -> None:
        while (tree := self.read_smi()) is not None:
            self._note_slow(what, tree)
            self._note_clock(what, tree)
            self._note_gpu_users(what, tree, self._known)
            if done.wait(_EVERY_S):
                return

    def _note_load(self, when: str, cores: float) -> None:
        if cores > self.limit:
            self._add(f"{when}: other programs keep {cores:.1f} of {self.cores} CPU cores busy")

    def _note_slow(self, when: str, tree: ET.Element | None) -> None:
        for gpu in () if tree is None else tree.iter("gpu"):
            if reasons := slowed_by(gpu):
                clock = text_of(gpu, "clocks/sm_clock") or "unknown"
                self._add(f"{when}: the GPU slows down ({', '.join(reasons)}; SM at ", f"{clock})")

    def _note_clock(self, what: str, tree: ET.Element) -> None:
        """Note a low clock without a reason, as after a power fault; only a busy GPU shows it."""
        for gpu in tree.iter("gpu"):
            if (clock := low_clock(gpu)) and not slowed_by(gpu):
                self._add(f"{what}: the GPU is busy, and without a reason its SM is at ", clock)

    def _note_gpu_users(
        self, when: str, tree: ET.Element | None, known: set[str] | tuple[()]
    ) -> None:
        new = {pid: name for pid, name in _users(tree).items() if pid not in known}
        if new:
            self._add(f"{when}: another program uses the GPU: {_named(new)}")

    def _add(self, text: str, reading: str = "") -> None:
        """Note a disturbance once, with its first reading, since clocks vary."""
        if not any(known.startswith(text) for known in self.disturbed):
            self.disturbed.append(text + reading)


def _users(tree: ET.Element | None) -> dict[str, str]:
    """Return the names of the programs that compute on a GPU, by process.

    Type G is graphics only: a desktop's, which a machine with a screen always has.
    """
    infos = () if tree is None else tree.iter("process_info")
    return {
        text_of(process, "pid"): text_of(process, "process_name")
        for process in infos
        if text_of(process, "type") != "G"
    }


def _named(users: Mapping[str, str]) -> str:
    return ", ".join(f"{name or 'unnamed'} ({pid})" for pid, name in sorted(users.items()))
