"""Watch memory while a server runs, and act before the machine stops answering.

Where GPU and host share one memory, a machine without any left is reported to hang until its power
is cut: no container ends, and nobody can log in. So the server, which has most of it, gives way.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.serving import memory, refusal, settings
from sparkforge.serving.memory import GIB, Reading

MODES = ("off", "warn", "on")
WARN_S, END_S = 5.0, 10.0
"""So long below the first and the third mark. The second counts at once: it costs little."""
_READINGS = 3  # at least, for the same: one that was paused wakes up with an old clock
_RELEASE = 1.25  # of the first mark: above it all is well again
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # mman.h of Linux


@dataclass
class _Low:
    """How long something has been so in a row."""

    since: float = 0.0
    readings: int = 0

    def lasts(self, so: bool, now: float, seconds: float) -> bool:
        """Note a reading at ``now``; returns whether it has been so for long enough."""
        if not so:
            self.readings = 0
            return False
        if not self.readings:
            self.since = now
        self.readings += 1
        return self.readings >= _READINGS and now - self.since >= seconds


@dataclass
class Guard:
    """Decides by what is left of memory: of the machine's, or up to the container's limit.

    Attributes:
        marks: GiB below which it warns, refuses new requests and ends the server.
        say: takes a line for the log.
        acts: False: it only warns.
        file: what the server's middleware looks for; None: nobody sends requests to this server.
        read: returns what there is of memory.
    """

    marks: tuple[float, float, float]
    say: Callable[[str], None]
    acts: bool = True
    file: Path | None = None
    read: Callable[[], Reading] = memory.read
    refuses: bool = field(default=False, init=False)
    _warned: bool = field(default=False, init=False)
    _blind: bool = field(default=False, init=False)
    _lows: tuple[_Low, _Low] = field(default_factory=lambda: (_Low(), _Low()), init=False)

    def begin(self) -> None:
        """Get ready; an earlier start of this container may have left its file."""
        self.close()
        warn, refuse, end = self.marks
        does = f"warns below {warn:g} GiB"
        if self.acts and self.file is not None:
            does += f", refuses requests below {refuse:g}"
        if self.acts:
            does += f", ends the server below {end:g}"
            stay_in_memory()
        self.say(f"memory guard: {does}")

    def look(self, now: float) -> bool:
        """Read memory and act; returns whether the server is to be ended.

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
        room, words = reading.room / GIB, _words(reading)
        warn, refuse, end = self.marks
        low, lowest = self._lows
        long_low = low.lasts(room < warn, now, WARN_S)
        if room > warn * _RELEASE:
            self._well(words)
        elif self.acts and self.file is not None and room < refuse and not self.refuses:
            self._refuse(self.file, words)
        elif long_low and not self._warned:
            self.say(f"warning: memory is short: {words}")
            self._warned = True
        if self.acts and lowest.lasts(room < end, now, END_S):
            self.say(
                f"error: memory is short: {words}, and it was less than {end:g} for {END_S:.0f} s:"
                " ending the server before the machine stops answering"
            )
            return True
        return False

    def close(self) -> None:
        """Leave no file behind."""
        if self.file is not None:
            try:
                self.file.unlink(missing_ok=True)
            except OSError as error:
                self.say(f"warning: {self.file} stays, and has requests refused: {error}")
        self.refuses = False

    def _refuse(self, file: Path, words: str) -> None:
        self.refuses = self._warned = True
        self.say(f"warning: memory is short: {words}: new requests are refused")
        whole = file.with_suffix(".new")
        try:
            whole.write_text(f"memory is short on this machine: {words}", encoding="utf-8")
            whole.replace(file)
        except OSError as error:
            self.say(f"warning: the server cannot be told to refuse requests: {error}")

    def _well(self, words: str) -> None:
        """Take everything back; ``words`` are empty where nobody knows."""
        for one in self._lows:
            one.readings = 0
        refused, warned, self._warned = self.refuses, self._warned, False
        if refused:
            self.close()
            self.say(": ".join(filter(None, (words, "new requests are taken again"))))
        elif warned and words:
            self.say(f"memory is well again: {words}")


def of(
    variables: Mapping[str, str], *, unified: bool, asked: bool, say: Callable[[str], None]
) -> Guard | None:
    """Return the guard that a user wants, or None.

    Args:
        variables: SPARKFORGE_MEMORY_GUARD and _MARKS count.
        unified: GPU and host share one memory; elsewhere it is off by default.
        asked: the server takes requests; the second of two machines takes none.

    Raises:
        StartError: a variable cannot be used.
    """
    default = "on" if unified else "off"
    mode = settings.choice(variables, "SPARKFORGE_MEMORY_GUARD", default, MODES)
    marks = settings.marks(variables)
    if mode == "off":
        return None
    acts = mode == "on"
    return Guard(marks, say, acts, refusal.path() if acts and asked else None)


def stay_in_memory() -> bool:
    """Keep this process' pages in memory; returns whether that is so.

    A machine that runs out of memory drops the pages of programs first, and whoever has to act then
    would wait for the disk. Not with a limit on locked memory: what goes beyond would fail.
    """
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return False
    flags = _MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT  # no page is fetched for it
    return bool(ctypes.CDLL(None).mlockall(flags) == 0)


def _words(reading: Reading) -> str:
    if reading.limit is not None and reading.room < reading.available:
        return (
            f"{reading.room / GIB:.1f} GiB are left of the container's limit of"
            f" {reading.limit / GIB:.1f} ({memory.LIMIT})"
        )
    return f"{reading.available / GIB:.1f} of {reading.total / GIB:.1f} GiB are available"
