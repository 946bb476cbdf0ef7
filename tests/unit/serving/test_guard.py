"""The guard of memory: what it does at which reading."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from sparkforge.serving import compilers, guard
from sparkforge.serving.errors import StartError
from sparkforge.serving.guard import Guard
from sparkforge.serving.memory import GIB, Reading
from tests.support import python

TOTAL = 100 * GIB


@pytest.fixture(autouse=True)
def _unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pages of the tests' own process where they are."""
    monkeypatch.setattr(guard, "stay_in_memory", lambda: True)


class Watched:
    """A guard on a machine that has what a test says, looked at twice a second."""

    def __init__(self, **options: Any) -> None:
        self.lines: list[str] = []
        self.refuses = False
        self.reading: Reading | Exception = Reading(TOTAL, 50 * GIB)
        options = {"refuse": self._refuse} | options
        self.guard: Guard = Guard((6, 4, 2), self.lines.append, read=self._read, **options)
        self.now = 1000.0

    def _refuse(self, short: bool) -> None:
        assert short is not self.refuses
        self.refuses = short

    def _read(self) -> Reading:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading

    def looks(self, available_gib: float, seconds: float) -> bool:
        """Look for so long; returns whether the server was to be ended."""
        self.reading = Reading(TOTAL, int(available_gib * GIB))
        return self.again(seconds)

    def again(self, seconds: float) -> bool:
        ended = False
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            ended = self.guard.look(self.now) or ended
        return ended


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_enough_memory_is_no_line(watched: Watched) -> None:
    assert not watched.looks(7, 3600)
    assert watched.lines == []


def test_a_warning_takes_seconds_and_comes_once(watched: Watched) -> None:
    watched.looks(5, 4)
    watched.looks(7, 1)
    watched.looks(5, 4.5)
    assert watched.lines == []
    watched.looks(5, 3600)
    assert watched.lines == ["warning: memory is short: 5.0 of 100.0 GiB are available"]
    watched.looks(7, 60)  # above the mark, but hardly
    watched.looks(5, 60)
    assert len(watched.lines) == 1
    watched.looks(8, 1)
    watched.looks(5, 60)
    assert watched.lines[1:] == [
        "memory is no longer short: 8.0 of 100.0 GiB are available",
        watched.lines[0],
    ]
    assert not watched.refuses


def test_requests_are_refused_until_there_is_enough_again(watched: Watched) -> None:
    seen = []
    for available, seconds in ((3.9, 0.5), (3, 60), (7, 60), (8, 1)):
        watched.looks(available, seconds)
        seen.append(watched.refuses)
    assert seen == [True, True, True, False]
    watched.looks(50, 1)
    assert watched.lines == [
        "warning: memory is short: 3.9 of 100.0 GiB are available: new requests are refused",
        "8.0 of 100.0 GiB are available: new requests are accepted again",
    ]


def test_the_server_is_ended_when_it_lasts(watched: Watched) -> None:
    assert not watched.looks(1.5, 10)
    assert not watched.looks(3, 0.5)
    assert not watched.looks(1.5, 10)
    assert watched.looks(1.5, 0.5)
    assert watched.lines[-1] == (
        "error: memory is short: 1.5 of 100.0 GiB are available, and it was less than 2 for 10 s:"
        " ending the server before the machine stops responding"
    )


def test_a_pause_is_not_taken_for_a_long_shortage(watched: Watched) -> None:
    watched.looks(1, 0.5)
    watched.now += 3600
    assert not watched.again(0.5)


@pytest.mark.parametrize(
    "error", [OSError("gone"), KeyError("MemTotal"), ValueError("x"), IndexError("x")]
)
def test_what_cannot_be_read_ends_nothing(watched: Watched, error: Exception) -> None:
    watched.looks(1, 9)
    assert watched.lines[-1].endswith("refused")
    watched.reading = error
    assert not watched.again(3600)
    assert not watched.refuses
    assert sum("cannot be read" in line for line in watched.lines) == 1
    assert not watched.looks(1, 10)  # the time before does not count
    assert watched.looks(1, 1)


def test_the_containers_limit_counts_where_it_is_nearer(watched: Watched) -> None:
    watched.reading = Reading(TOTAL, 50 * GIB, 32 * GIB, 29 * GIB)
    watched.again(1)
    assert watched.lines == [
        "warning: memory is short: 3.0 GiB are left of the container's limit of 32.0"
        " (SPARKFORGE_MEMORY_LIMIT): new requests are refused"
    ]


def test_one_that_only_warns_does_nothing_else() -> None:
    one = Watched(acts=False)
    assert not one.looks(1, 3600)
    assert not one.refuses
    assert one.lines == ["warning: memory is short: 1.0 of 100.0 GiB are available"]


def test_a_worker_refuses_nobody_and_ends() -> None:
    one = Watched(refuse=None)
    one.guard.begin()
    assert one.lines == ["memory guard: warns below 6 GiB, ends the server below 2"]
    assert one.looks(1, 11)


def test_its_pages_stay_in_memory_where_nothing_limits_that() -> None:
    code = (
        "from sparkforge.serving.guard import stay_in_memory; print(stay_in_memory());"
        "print(*(l for l in open('/proc/self/status') if 'VmLck' in l))"
    )
    with python(code) as process:
        said = process.communicate()[0]
    free = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    assert said.startswith("True" if free else "False")
    assert ("VmLck:\t       0 kB" in said) is not free


# -- settings --------------------------------------------------------------------


def made(variables: dict[str, str], *, unified: bool = True, asked: bool = True) -> Guard | None:
    return guard.of(variables, unified=unified, refuse=print if asked else None, say=print)


def test_it_is_on_where_memory_is_shared() -> None:
    assert made({}, unified=False) is None
    assert made({"SPARKFORGE_MEMORY_GUARD": "off"}) is None
    one, other = made({}), made({"SPARKFORGE_MEMORY_GUARD": "on"}, unified=False)
    assert one is not None
    assert other is not None
    assert one.marks == other.marks
    assert list(one.marks) == [6, 4, 2]
    assert one.acts
    assert one.refuse is other.refuse is print
    worker = made({"SPARKFORGE_MEMORY_MARKS": "9, 5.5,1"}, asked=False)
    assert worker is not None
    assert worker.refuse is None
    assert list(worker.marks) == [9, 5.5, 1]
    warns = made({"SPARKFORGE_MEMORY_GUARD": "warn"})
    assert warns is not None
    assert not warns.acts


@pytest.mark.parametrize("marks", ["2,4,6", "6,4", "6,4,0", "6,4,x", "inf,4,2", "nan,4,2", "6,6,2"])
def test_marks_that_cannot_be_are_refused(marks: str) -> None:
    with pytest.raises(StartError, match=r"^SPARKFORGE_MEMORY_MARKS is .*: use three falling"):
        made({"SPARKFORGE_MEMORY_MARKS": marks})


def test_the_compilers_of_a_spark_are_known_by_the_names_that_the_kernel_keeps() -> None:
    names = compilers.PROGRAMS
    assert {"ptxas-blackwell", "cc1", "nvlink", "cicc", "ld"} <= names
    assert all(len(name) < 16 for name in names)  # TASK_COMM_LEN
