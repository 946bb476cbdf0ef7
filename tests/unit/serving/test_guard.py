"""The guard of memory: what it does at which reading."""

from __future__ import annotations

from typing import Any

import pytest

from sparkforge.serving import guard
from sparkforge.serving.guard import Guard
from sparkforge.serving.memory import GIB, Reading

TOTAL = 100 * GIB


class Watched:
    """A guard on a machine that has what a test says, looked at twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.lines: list[str] = []
        monkeypatch.setattr(guard, "say", self.lines.append)
        self.refuses = False
        self.reading: Reading | Exception = Reading(TOTAL, 50 * GIB)
        options = {"refuse": self._refuse} | options
        self.guard: Guard = Guard(read=self._read, **options)
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
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


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


def test_memory_that_cannot_be_read_ends_nothing(watched: Watched) -> None:
    watched.reading = OSError("gone")
    assert not watched.again(3600)


def test_the_containers_limit_counts_where_it_is_nearer(watched: Watched) -> None:
    watched.reading = Reading(TOTAL, 50 * GIB, 32 * GIB, 29 * GIB)
    watched.again(1)
    assert watched.refuses
    assert "container's limit of 32.0" in watched.lines[0]


def test_one_that_only_warns_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watched(monkeypatch, acts=False)
    assert not one.looks(1, 3600)
    assert not one.refuses
    assert one.lines == ["warning: memory is short: 1.0 of 100.0 GiB are available"]


def test_a_worker_refuses_nobody_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(monkeypatch, refuse=None).looks(1, 11)
