"""Run one compiler when there is memory for it; wait until then.

ccache starts it in front of each compiler (CCACHE_PREFIX), inside of the builder container; so it
needs nothing but the standard library. As many compilers as there are slots run at once. A new one
starts when there is room for it; the oldest never waits, so the build always goes on. A running one
that is not the oldest is stopped (SIGSTOP) while less than the reserve is available, and goes on
when there is room again: the machine slows down, and the kernel kills nothing. Stopped ones keep
their memory. If the running ones take half of the reserve, too, the newest is ended and waits at
the door like a new one. So a file that takes more than was counted for it costs time, and no more.

Slots are files locked with flock: a killed compiler gives its slot back. A gate that is killed
takes its compiler with it, a stopped one too: nothing would ever resume it.

FOLDER/units.tsv, or the file SPARKFORGE_NOTES, lists each compiler: peak MiB of its largest
process, seconds of CPU, seconds, exit code, and the source.

Variables: SPARKFORGE_SLOTS (folder), SPARKFORGE_JOBS (number), SPARKFORGE_JOB_MIB,
SPARKFORGE_RESERVE_MIB, SPARKFORGE_MEMINFO (file to read in place of /proc/meminfo), SPARKFORGE_ROOT
(folder of the package sparkforge, which reads the limits of control groups, too; the builder
container has no limit and sees none of those around it, so there MemAvailable is all).
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_LOOK_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SOURCES = (".cu", ".cpp", ".cc", ".c", ".cxx")


class Gate:
    """The slots of one build, and the memory that is left.

    Args:
        folder: holds one file a slot.
        job_mib: what one compiler takes at most.
        reserve_mib: below it, all but the oldest are stopped.
        available_mib: returns the available memory.
        notes: file for the compilers' resources; None: ``units.tsv`` in the folder.
    """

    def __init__(
        self,
        folder: Path,
        jobs: int,
        job_mib: int,
        reserve_mib: int,
        available_mib: Callable[[], int],
        notes: Path | None = None,
    ) -> None:
        self._notes = notes or folder / "units.tsv"
        self._folder, self._jobs = folder, jobs
        self._job_mib, self._reserve_mib, self.available_mib = job_mib, reserve_mib, available_mib
        self._mine: IO[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self) -> None:
        """Wait for a slot and for memory; returns at once if no other compiler runs."""
        while True:
            # one at a time: two that come at once must not both see the same free memory
            with (self._folder / "door").open("a") as door:
                fcntl.flock(door, fcntl.LOCK_EX)
                if self._take():
                    return
            time.sleep(_LOOK_S)

    def _take(self) -> bool:
        held = self._held()
        # a compiler that has just begun has not taken its memory yet: count half of it as
        # taken for each
        young = sum(time.monotonic() - since < 20 for since in held.values())
        needed = self._reserve_mib + self._job_mib + young * self._job_mib // 2
        if len(held) >= self._jobs or (held and self.available_mib() < needed):
            return False
        for number in range(self._jobs):
            file = (self._folder / f"slot-{number}").open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            file.truncate(0)
            file.write(f"{time.monotonic()}\n")
            file.flush()
            self._mine = file
            return True
        return False

    def _held(self) -> dict[str, float]:
        """Return the slots in use, each with the time it was taken."""
        held = {}
        for path in self._folder.glob("slot-*"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read().strip()
                    held[path.name] = float(text) if text else time.monotonic()
        return held

    def must_wait(self) -> bool:
        """Return whether this running compiler must be stopped for now."""
        if self.available_mib() >= self._reserve_mib:
            return False
        return not self._oldest()

    def may_go_on(self) -> bool:
        """Return whether this stopped compiler may run again."""
        # some room above the reserve, or it would be stopped again at once
        return self._oldest() or self.available_mib() >= self._reserve_mib + self._job_mib // 4

    def must_give_way(self) -> bool:
        """Return whether this stopped compiler must give its memory back."""
        if self.available_mib() >= self._reserve_mib // 2:
            return False
        mine, order = self._order()
        return order[0] != mine and order[-1] == mine

    def leave(self) -> None:
        """Release the slot."""
        assert self._mine is not None
        self._mine.close()
        self._mine = None

    def _oldest(self) -> bool:
        mine, order = self._order()
        return order[0] == mine

    def _order(self) -> tuple[str, list[str]]:
        """Return the name of our slot, and of all that are held, the oldest first."""
        assert self._mine is not None
        mine = Path(self._mine.name).name
        held = self._held()
        return mine, sorted(held, key=lambda name: (held[name], name)) or [mine]

    def note(self, command: list[str], seconds: float, code: int) -> None:
        """Note the resources used by the compiler that this process ran."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        source = next((word for word in command if word.endswith(_SOURCES)), "-")
        line = (
            f"{used.ru_maxrss // 1024}\t{used.ru_utime + used.ru_stime:.2f}\t{seconds:.1f}"
            f"\t{code}\t{source}\n"
        )
        with self._notes.open("a") as file:  # one write: lines stay whole
            file.write(line)


def guard(group: int) -> int:
    """Have a process group killed if this process ends without notice, as by SIGKILL.

    The kernel's own means (PR_SET_PDEATHSIG) reaches nvcc, and not the cicc that holds the memory.

    Returns:
        A descriptor; a byte written to it is the notice.
    """
    ours, word = os.pipe()
    if os.fork():
        os.close(ours)
        return word
    try:
        os.setsid()  # signals to the gate's group, Ctrl-C too, do not reach this process
        os.close(word)
        # it holds the gate's slot, too: until the compiler is dead, its memory is not free
        if not os.read(ours, 1):
            os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the compiler had ended
    finally:
        os._exit(0)  # the gate handles the rest


def dismiss(word: int) -> None:
    """Report to the guard that there is nothing to kill."""
    try:
        os.write(word, b"x")
    except BrokenPipeError:
        pass  # the guard was killed
    os.close(word)


def run(gate: Gate, command: list[str]) -> int:
    """Run a compiler behind the gate; returns its exit code."""
    while True:
        gate.enter()
        begun = time.monotonic()
        code = attempt(gate, command)
        if code is not None:
            gate.note(command, time.monotonic() - begun, code)
            return code
        gate.leave()


def attempt(gate: Gate, command: list[str]) -> int | None:
    """Run a compiler once; returns its exit code, or None where it gave way to others."""
    # a group of its own: nvcc starts cicc and ptxas, which take the memory
    child = subprocess.Popen(command, start_new_session=True)
    word = guard(child.pid)

    def end(number: int, frame: object) -> None:
        os.killpg(child.pid, signal.SIGKILL)
        sys.exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)
    stopped = False
    while True:
        try:
            code = child.wait(_LOOK_S)
            dismiss(word)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            pass
        if not stopped and gate.must_wait():
            os.killpg(child.pid, signal.SIGSTOP)
            stopped = True
        elif stopped and gate.may_go_on():
            os.killpg(child.pid, signal.SIGCONT)
            stopped = False
        elif stopped and gate.must_give_way():
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for number in _SIGNALS:  # while it waits at the door there is nothing to end
                signal.signal(number, signal.SIG_DFL)
            dismiss(word)
            return None


def within_limits(root: str) -> Callable[[], int]:
    """Return a function for the memory that the limits of control groups leave, MiB.

    Args:
        root: folder of the package that has it.
    """
    sys.path.append(root)
    from sparkforge.serving import memory

    return lambda: memory.read().room >> 20


def mem_available(meminfo: Path) -> int:
    """Return MemAvailable, MiB."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise OSError(f"{meminfo}: has no MemAvailable")


def main() -> int:
    environ = os.environ
    meminfo = Path(environ.get("SPARKFORGE_MEMINFO", "/proc/meminfo"))
    root = environ.get("SPARKFORGE_ROOT")
    gate = Gate(
        Path(environ["SPARKFORGE_SLOTS"]),
        int(environ["SPARKFORGE_JOBS"]),
        int(environ["SPARKFORGE_JOB_MIB"]),
        int(environ["SPARKFORGE_RESERVE_MIB"]),
        (lambda: mem_available(meminfo)) if root is None else within_limits(root),
        Path(environ["SPARKFORGE_NOTES"]) if "SPARKFORGE_NOTES" in environ else None,
    )
    return run(gate, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
