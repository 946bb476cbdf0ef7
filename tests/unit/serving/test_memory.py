"""The share of a unified memory, and what a container's limit has to do with it."""

from pathlib import Path
from typing import Any

import pytest

from sparkforge.pins import pins
from sparkforge.serving import memory
from sparkforge.serving.memory import GIB, Guard, Reading
from sparkforge.serving.options import StartError
from sparkforge.serving.profile import MemoryPlan
from tests.support import ROOT

SPARK_GIB = 119.7  # MemTotal of a Spark as its owners report it
TOTAL = int(SPARK_GIB * GIB)
PLAN = MemoryPlan(keep_free_gib=12, most_percent=80, least_gib=75)


def machine(root: Path, *, available_gib: float, **group: str) -> Path:
    """A root folder with the files that are read: total memory is a Spark's."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {int(SPARK_GIB * (1 << 20))} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {int(available_gib * (1 << 20))} kB\nHugePages_Total:       0\n"
    )
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)
    return root


def test_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    stat = f"anon {3 * GIB}\nshmem 1\nactive_file {GIB}\ninactive_file {5 * GIB}\n"
    reading = memory.read(
        machine(
            tmp_path,
            available_gib=114,
            memory_max=f"{100 * GIB}\n",
            memory_current=str(9 * GIB),
            memory_stat=stat,
        )
    )
    assert (reading.limit, reading.used, reading.room) == (100 * GIB, 3 * GIB, 97 * GIB)
    assert reading.available == 114 * GIB


# -- worked examples ------------------------------------------------------------------

# GiB available, the container's limit in GiB; share, GiB of it and GiB left
CASES: list[tuple[float, int | None, str]] = [
    (115.85, None, "0.80, 95.8, 20.1"),
    (87.5, None, "refused"),
    (115.85, 64, "0.80, 95.8, 20.1"),
    (115.85, 12, "refused: the limit"),
    (87.5, 112, "refused"),
]


def spark_plan() -> MemoryPlan:
    loaded = pins.load(ROOT / "pins.yaml")
    plan = loaded.profile_of(loaded.target("spark")).memory
    assert plan is not None
    return plan


def outcome(available_gib: float, limit_gib: int | None) -> str:
    """Return share, GiB asked for and GiB left of what was available, or what refuses."""
    limit = None if limit_gib is None else limit_gib * GIB
    reading = Reading(TOTAL, int(available_gib * GIB), limit)
    try:
        share = memory.utilisation(spark_plan(), reading, TOTAL)
    except StartError as error:
        named = "SPARKFORGE_MEMORY_LIMIT" in str(error)
        return "refused: the limit" if named else "refused"
    asked = share * SPARK_GIB
    return f"{share:.2f}, {asked:.1f}, {available_gib - asked:.1f}"


@pytest.mark.parametrize(("available", "limit", "expected"), CASES)
def test_worked_examples(available: float, limit: int | None, expected: str) -> None:
    assert outcome(available, limit) == expected


def test_the_share_is_of_what_cuda_counts() -> None:
    """VLLM multiplies it by that; owners report 121.7 GiB where MemTotal says 119.7."""
    reading, cuda = Reading(TOTAL, 98 * GIB), int(121.7 * GIB)
    assert memory.utilisation(PLAN, reading) == 0.71  # (98 - 12) / 119.7 = 0.718
    assert memory.utilisation(PLAN, reading, cuda) == 0.70  # (98 - 12) / 121.7 = 0.707


# -- the guard --


class Watched:
    """A guard on a machine that has what a test says, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.lines: list[str] = []
        monkeypatch.setattr(memory, "say", self.lines.append)
        self.refuses = False
        self.reading = Reading(100 * GIB, 50 * GIB)
        entrance: Any = self
        self.guard = Guard(read=lambda: self.reading, entrance=entrance, **options)
        self.now = 1000.0

    def refuse(self, short: bool) -> None:
        self.refuses = short

    def looks(self, available_gib: float, seconds: float) -> bool:
        """Look for so long; returns whether the server was to be ended."""
        self.reading = Reading(100 * GIB, int(available_gib * GIB))
        return self.again(seconds)

    def again(self, seconds: float) -> bool:
        ended = False
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            try:
                self.guard.look(self.now)
            except StartError as error:
                ended = True
                self.lines.append(str(error))
        return ended


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_warning_comes_once(watched: Watched) -> None:
    for available in (7, 5, 7, 5):  # above the mark, but hardly
        assert not watched.looks(available, 60)
    assert watched.lines == ["warning: memory is short: 5.0 of 100.0 GiB are available"]
    watched.looks(8, 1)
    watched.looks(5, 60)
    assert len(watched.lines) == 3
    assert not watched.refuses


def test_requests_are_refused_until_there_is_enough_again(watched: Watched) -> None:
    seen = []
    for available, seconds in ((3.9, 0.5), (3, 60), (7, 60), (8, 1)):
        watched.looks(available, seconds)
        seen.append(watched.refuses)
    assert seen == [True, True, True, False]
    assert len(watched.lines) == 2


def test_the_server_is_ended_when_it_lasts(watched: Watched) -> None:
    assert not watched.looks(1.5, 10)
    assert not watched.looks(3, 0.5)
    assert not watched.looks(1.5, 10)
    assert watched.looks(1.5, 0.5)
    assert "ending the server before the machine stops" in watched.lines[-1]


def test_the_containers_limit_counts_where_it_is_nearer(watched: Watched) -> None:
    watched.reading = Reading(100 * GIB, 50 * GIB, 32 * GIB, 29 * GIB)
    watched.again(1)
    assert watched.refuses
    assert "container's limit is 32.0" in watched.lines[0]


def test_one_that_only_warns_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch, acts=False)
    assert not one.looks(1, 3600)
    assert not one.refuses
    assert one.lines == ["warning: memory is short: 1.0 of 100.0 GiB are available"]
