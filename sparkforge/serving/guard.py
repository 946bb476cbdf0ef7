"""Watch memory while a server runs, and act before the machine stops responding.

Where GPU and host share one memory, a machine that runs out of it is reported to hang until a power
cycle: no container ends, and no login works. So the server, which uses most of it, has to give way.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkforge.serving import memory
from sparkforge.serving.errors import say
from sparkforge.serving.memory import GIB, Reading

MARKS = (6.0, 4.0, 2.0)
"""GiB below which the guard warns, refuses new requests and ends the server. An estimate: no Spark
has run out of memory under it."""
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

    acts: bool = True
    """False: it only warns."""
    refuse: Callable[[bool], None] | None = None
    """Has the front door refuse new requests, or no longer; None: the server takes none."""
    marks: tuple[float, float, float] = MARKS
    read: Callable[[], Reading] = memory.read
    _refuses: bool = field(default=False, init=False)
    _warned: bool = field(default=False, init=False)
    _blind: bool = field(default=False, init=False)
    _low: _Low = field(default_factory=_Low, init=False)
    _lowest: _Low = field(default_factory=_Low, init=False)

    def begin(self) -> None:
        """Log the marks, and lock this process' pages in memory.

        A machine that runs out of memory drops the pages of programs first, and the guard would
        wait for the disk. Not with a limit on locked memory, beyond which allocations would fail.
        """
        warn, refuse, end = self.marks
        actions = f", refuses requests below {refuse:g}, ends the server below {end:g}"
        say(f"memory guard: warns below {warn:g} GiB{actions if self.acts else ''}")
        if self.acts and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
            ctypes.CDLL(None).mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)

    def look(self, now: float) -> bool:
        """Read memory and act; returns whether the server has to end.

        Args:
            now: seconds of the monotonic clock.
        """
        try:
            reading = self.read()
        except (OSError, ValueError, LookupError) as error:
            if not self._blind:
                say(f"warning: memory cannot be read, and is not guarded: {error!r}")
            self._blind = True
            self._set(refuses=False)
            return False
        self._blind = False
        room = reading.room / GIB
        text = f"{room:.1f} of {reading.total / GIB:.1f} GiB are available"
        if reading.limit is not None and reading.room < reading.available:
            limit = reading.limit / GIB
            text = f"{room:.1f} GiB are left of the container's limit of {limit:.1f}"
        warn, refuse, end = self.marks
        long_low = self._low.lasts(room < warn, now, WARN_S)
        if room > warn * _RELEASE:
            if self._refuses:
                say(f"{text}: new requests are accepted again")
            elif self._warned:
                say(f"memory is no longer short: {text}")
            self._warned = False
            self._set(refuses=False)
        elif self.acts and room < refuse and not self._refuses:
            say(f"warning: memory is short: {text}: new requests are refused")
            self._warned = True
            self._set(refuses=True)
        elif long_low and not self._warned:
            say(f"warning: memory is short: {text}")
            self._warned = True
        if self.acts and self._lowest.lasts(room < end, now, END_S):
            say(
                f"error: memory is short: {text}, and it was less than {end:g} for {END_S:.0f} s:"
                " ending the server before the machine stops responding"
            )
            return True
        return False

    def _set(self, *, refuses: bool) -> None:
        if refuses != self._refuses and self.refuse is not None:
            self.refuse(refuses)
        self._refuses = refuses
