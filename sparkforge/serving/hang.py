"""The decision that a server hangs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Hang:
    """Counts failed checks of a server. Times are seconds of the monotonic clock.

    One failed check proves nothing, and neither does a long time without a check: a container that
    was paused wakes up with an old clock. It takes ``looks`` failures in a row, and ``limit_s``
    less ``spare_s`` since the last success.
    """

    limit_s: float
    slow_s: float = 600.0
    """For a server that computes, and does not answer: one request of a client may be slow."""
    looks: int = 3
    spare_s: float = 0.0
    answered: bool = False
    _since: float = 0.0
    _well: float = 0.0
    _failures: int = 0

    def well(self, now: float) -> None:
        """Note a success that began at ``now``."""
        self.answered, self._since, self._well, self._failures = True, now, now, 0

    def excused(self, now: float) -> None:
        """Note a failure at ``now`` that has a good reason."""
        self._since, self._failures = now, 0

    def slow(self, now: float) -> bool:
        """Note a failure of a server that computes; returns whether it hangs."""
        if now - self._well >= max(self.slow_s, self.limit_s):
            return self.ill(now)
        self.excused(now)
        return False

    def ill(self, now: float) -> bool:
        """Note a failure; returns whether the server hangs."""
        self._failures += 1
        enough = self._failures >= self.looks and now - self._since >= self.limit_s - self.spare_s
        return self.answered and self.limit_s > 0 and enough
