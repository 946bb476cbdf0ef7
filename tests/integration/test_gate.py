"""The gate in front of each compiler: real processes, made-up readings of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkforge.build import jobs
from tests.support import PATIENCE_S, ROOT, alive, wait_for

GATE = ROOT / "sparkforge" / "build" / "compile" / "gate.py"
# notes that it runs, then counts, so that a stopped one is seen to stand still
COMPILER = """
import pathlib, sys, time
name, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
n = 0
while time.monotonic() < end:
    n += 1
    pathlib.Path(name).write_text(str(n))
    time.sleep(0.02)
pathlib.Path(name + ".done").touch()
sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
"""


class Room:
    """A folder of slots, and the memory that the gates of it read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[bytes]] = []
        self.free(64 * 1024)

    def free(self, mib: int) -> None:
        fresh = self.folder / "fresh"
        fresh.write_text(f"MemTotal: 134217728 kB\nMemAvailable: {mib * 1024} kB\n")
        fresh.rename(self.folder / "meminfo")

    def compile(
        self, name: str, seconds: float, code: int = 0, at_once: int = 4
    ) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "SPARKFORGE_SLOTS": str(self.folder / "slots"),
            "SPARKFORGE_JOBS": str(at_once),
            "SPARKFORGE_JOB_MIB": "8000",
            "SPARKFORGE_RESERVE_MIB": "4000",
            "SPARKFORGE_MEMINFO": str(self.folder / "meminfo"),
        }
        child = subprocess.Popen(
            [
                sys.executable,
                "-IS",
                GATE,
                sys.executable,
                "-c",
                COMPILER,
                self.folder / name,
                str(seconds),
                str(code),
            ],
            env=env,
        )
        self.children.append(child)
        return child

    def at_work(
        self, name: str, seconds: float, code: int = 0, at_once: int = 4
    ) -> subprocess.Popen[bytes]:
        """Compile, and return when the compiler has begun."""
        child = self.compile(name, seconds, code, at_once)
        wait_for(lambda: self.begun(name))
        return child

    def begun(self, name: str) -> bool:
        return (self.folder / name).exists()

    def done(self, name: str) -> bool:
        return (self.folder / f"{name}.done").exists()

    def moves(self, name: str, within_s: float = 20) -> bool:
        before = (self.folder / name).read_text()
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if (self.folder / name).read_text() != before:
                return True
            time.sleep(0.05)
        return False

    def stands(self, name: str) -> bool:
        return not self.moves(name, within_s=0.5)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path)
    yield made
    for child in made.children:  # what a failed test left
        child.terminate()
        child.wait(PATIENCE_S)


def test_the_compiler_s_exit_code_comes_through(room: Room) -> None:
    assert room.compile("a", 0.1).wait(PATIENCE_S) == 0
    assert room.compile("b", 0.1, code=3).wait(PATIENCE_S) == 3


def test_no_more_run_at_once_than_there_are_slots(room: Room) -> None:
    first = room.at_work("a", 2, at_once=1)
    second = room.compile("b", 0.1, at_once=1)
    time.sleep(0.8)
    assert not room.begun("b")
    assert first.wait(PATIENCE_S) == second.wait(PATIENCE_S) == 0
    assert room.done("b")


def test_a_second_waits_for_memory_and_the_first_never_does(room: Room) -> None:
    room.free(1000)
    room.at_work("a", 30)
    second = room.compile("b", 0.1)
    time.sleep(0.8)
    assert not room.begun("b")
    room.free(64 * 1024)
    assert second.wait(PATIENCE_S) == 0


def test_the_limits_of_control_groups_count_where_the_package_is_known(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own reading (tests/unit/serving/test_memory.py) is replaced by one of 1 GiB."""
    package = room.folder / "sparkforge" / "serving"
    package.mkdir(parents=True)
    reading = "class Reading:\n    room = 1 << 30\n\n\nread = Reading\n"
    (package / "memory.py").write_text(reading)
    monkeypatch.setenv("SPARKFORGE_ROOT", str(room.folder))
    room.at_work("a", 30)
    second = room.compile("b", 0.1)  # MemAvailable would be enough
    time.sleep(0.8)
    assert not room.begun("b")
    (package / "memory.py").write_text(reading.replace("1 << 30", "64 << 30"))
    assert room.compile("c", 0.1).wait(PATIENCE_S) == 0
    second.terminate()


def test_the_younger_is_stopped_while_memory_is_short_and_goes_on_after(room: Room) -> None:
    room.at_work("a", 60)
    room.at_work("b", 60)
    room.free(3000)
    wait_for(lambda: room.stands("b"))
    assert room.moves("a")
    # a little above the reserve is not enough: it would be stopped again at once
    room.free(4100)
    assert room.stands("b")
    room.free(16_000)
    assert room.moves("b", within_s=10)


def test_a_stopped_one_goes_on_when_it_is_the_oldest_whatever_memory_says(room: Room) -> None:
    first = room.at_work("a", 4)
    second = room.at_work("b", 3)
    room.free(2100)
    wait_for(lambda: room.stands("b"))
    assert first.wait(PATIENCE_S) == 0
    assert second.wait(PATIENCE_S) == 0
    assert room.done("b")


def test_the_newest_gives_its_memory_back_where_stopping_is_not_enough(room: Room) -> None:
    """What one of 10.4 GiB does to a count of 7.6 GiB each: the others' memory is not enough."""
    room.at_work("a", 60)
    second = room.at_work("b", 1)
    room.free(1900)
    wait_for(lambda: not children(second.pid, compilers=True))
    assert room.moves("a")
    # less than a new one needs: it does not come back to be ended again
    room.free(11_000)
    time.sleep(0.8)
    assert not children(second.pid, compilers=True)
    room.free(64 * 1024)
    assert second.wait(PATIENCE_S) == 0
    assert room.done("b")


def test_three_give_way_one_after_the_other_and_the_oldest_never(room: Room) -> None:
    gates = {}
    for name in ("a", "b", "c"):
        gates[name] = room.at_work(name, 60)
    room.free(1900)
    wait_for(lambda: not children(gates["b"].pid, compilers=True))
    assert not children(gates["c"].pid, compilers=True)
    assert room.moves("a")
    gates["c"].terminate()  # it has no compiler now
    assert gates["c"].wait(PATIENCE_S) == -signal.SIGTERM


def test_a_compile_ends_well_without_its_guard(room: Room) -> None:
    gate = room.at_work("a", 1, code=3)
    (guard,) = set(children(gate.pid)) - set(children(gate.pid, compilers=True))
    os.kill(guard, signal.SIGKILL)
    assert gate.wait(PATIENCE_S) == 3


def test_a_killed_one_gives_its_slot_back(room: Room) -> None:
    first = room.at_work("a", 5, at_once=1)
    first.kill()
    assert room.compile("b", 0.1, at_once=1).wait(PATIENCE_S) == 0


def test_a_killed_gate_takes_its_stopped_compiler_with_it(room: Room) -> None:
    room.at_work("a", 60)
    second = room.at_work("b", 60)
    room.free(3000)
    wait_for(lambda: room.stands("b"))
    (compiler,) = children(second.pid, compilers=True)
    ours = children(second.pid)
    assert state(compiler) == "T"
    second.kill()
    second.wait()
    wait_for(lambda: not any(map(alive, ours)))
    assert room.moves("a")


def children(pid: int, *, compilers: bool = False) -> list[int]:
    """Return a process's children, its guard among them, or those that are compilers."""
    found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for one in found if alive(one) and (not compilers or compiles(one))]


def compiles(pid: int) -> bool:
    return b"gate.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_each_compiler_took_is_noted(room: Room) -> None:
    assert room.compile("a.cu", 0.1).wait(PATIENCE_S) == 0
    assert room.compile("b.cu", 0.1, code=3).wait(PATIENCE_S) == 3
    lines = (room.folder / "slots" / "units.tsv").read_text().splitlines()
    first, second = (line.split("\t") for line in lines)
    assert first[4] == str(room.folder / "a.cu")
    assert (first[3], second[3]) == ("0", "3")
    # a Python: more than 5 MiB, less than 100; under a second of CPU
    assert 5 < int(first[0]) < 100
    assert 0 < float(first[1]) < 2


def test_sigterm_ends_the_compiler_too(room: Room) -> None:
    child = room.at_work("a", 60)
    child.terminate()
    assert child.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert room.stands("a")


@pytest.mark.parametrize(
    ("free", "cpus", "gib", "expected"),
    [(119, 20, 10.4, 11), (26, 2, 10.4, 2), (8, 20, 10.4, 1), (119, 20, 2.0, 20)],
)
def test_jobs_come_from_what_is_free(
    free: float, cpus: int, gib: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "available_gib", lambda: free)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    assert jobs.width(None, gib, jobs.KEEP_GIB) == expected
    assert jobs.width(7, gib, jobs.KEEP_GIB) == 7
