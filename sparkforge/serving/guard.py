"""Watch memory while a server runs, and act before the machine stops responding.

Where GPU and host share one memory, a machine that runs out of it is reported to hang until a power
cycle: no container ends, and no login works. So the server, which uses most of it, has to give way.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparkforge.serving import memory, variables
from sparkforge.serving.memory import GIB, Reading

MODES = ("off", "warn", "on")
WARN_S, END_S = 5.0, 10.0
"""Seconds below the first and the third mark. The second acts at once: refusing costs little."""
_READINGS = 3  # at least, since a paused container wakes up with an old clock
_RELEASE = 1.25  # times the first mark: above it memory is no longer short
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # mman.h of Linux


@dataclass
class _Low:
    """Counts readings below a mark, in a row."""

    since: float = 0.0
    readings: int = 0

    def lasts(self, below: bool, now: float, seconds: float) -> bool:
        """Note a reading at ``now``; returns whether memory has been below for long enough."""
        if not below:
            self.readings = 0
            return False
        if not self.readings:
            self.since = now
        self.readings += 1
        return self.readings >= _READINGS and now - self.since >= seconds


@dataclass
class Guard:
    """Acts on the memory that is left: the machine's, or up to the container's limit."""

    marks: tuple[float, float, float]
    """GiB below which it warns, refuses new requests and ends the server."""
    say: Callable[[str], None]
    acts: bool = True
    """False: it only warns."""
    refuse: Callable[[bool], None] | None = None
    """Has the front door refuse new requests, or no longer; None: the server takes none."""
    read: Callable[[], Reading] = memory.read
    refuses: bool = field(default=False, init=False)
    _warned: bool = field(default=False, init=False)
    _blind: bool = field(default=False, init=False)
    _lows: tuple[_Low, _Low] = field(default_factory=lambda: (_Low(), _Low()), init=False)

    def begin(self) -> None:
        """Log the marks."""
        warn, refuse, end = self.marks
        actions = f"warns below {warn:g} GiB"
        if self.acts and self.refuse is not None:
            actions += f", refuses requests below {refuse:g}"
        if self.acts:
            actions += f", ends the server below {end:g}"
            stay_in_memory()
        self.say(f"memory guard: {actions}")

    def look(self, now: float) -> bool:
        """Read memory and act; returns whether the server has to end.

        Args:
            now: seconds of the monotonic clock.
        """
        try:
            reading = self.read()
        except (OSError, ValueError, LookupError) as error:
            if not self._blind:
                self.say(f"warning: memory cannot be read, and is not guarded: {error!r}")
            self._blind = True
            self._well("")
            return False
        self._blind = False
        room, text = reading.room / GIB, _described(reading)
        warn, refuse, end = self.marks
        low, lowest = self._lows
        long_low = low.lasts(room < warn, now, WARN_S)
        if room > warn * _RELEASE:
            self._well(text)
        elif self.acts and self.refuse is not None and room < refuse and not self.refuses:
            self.refuses = self._warned = True
            self.say(f"warning: memory is short: {text}: new requests are refused")
            self.refuse(True)
        elif long_low and not self._warned:
            self.say(f"warning: memory is short: {text}")
            self._warned = True
        if self.acts and lowest.lasts(room < end, now, END_S):
            self.say(
                f"error: memory is short: {text}, and it was less than {end:g} for {END_S:.0f} s:"
                " ending the server before the machine stops responding"
            )
            return True
        return False

    def _well(self, text: str) -> None:
        """Return to normal; ``text`` is empty where memory cannot be read."""
        for low in self._lows:
            low.readings = 0
        refused, warned, self._warned = self.refuses, self._warned, False
        if refused and self.refuse is not None:
            self.refuses = False
            self.refuse(False)
            self.say(": ".join(filter(None, (text, "new requests are accepted again"))))
        elif warned and text:
            self.say(f"memory is no longer short: {text}")


def of(
    environment: Mapping[str, str],
    *,
    unified: bool,
    refuse: Callable[[bool], None] | None,
    say: Callable[[str], None],
) -> Guard | None:
    """Return the guard for SPARKFORGE_MEMORY_GUARD and _MARKS, or None.

    Args:
        unified: GPU and host share one memory; elsewhere the guard is off by default.
        refuse: the front door's; the second of two machines has none.

    Raises:
        StartError: a variable cannot be used.
    """
    default = "on" if unified else "off"
    mode = variables.choice(environment, "SPARKFORGE_MEMORY_GUARD", default, MODES)
    marks = variables.marks(environment)
    if mode == "off":
        return None
    return Guard(marks, say, mode == "on", refuse)


def stay_in_memory() -> bool:
    """Lock this process' pages in memory; returns whether they are locked.

    A machine that runs out of memory drops the pages of programs first, and the guard would wait
    for the disk. Not with a limit on locked memory, beyond which allocations would fail.
    """
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return False
    flags = _MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT  # reads no page for it
    return bool(ctypes.CDLL(None).mlockall(flags) == 0)


def _described(reading: Reading) -> str:
    if reading.limit is not None and reading.room < reading.available:
        return (
            f"{reading.room / GIB:.1f} GiB are left of the container's limit of"
            f" {reading.limit / GIB:.1f} ({memory.LIMIT})"
        )
    return f"{reading.available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available"
