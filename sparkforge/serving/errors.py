"""Exit codes of the entrypoint, and the error that ends a start with one of them."""

from __future__ import annotations

# sysexits.h. What a restart may cure: the checkpoint, the hub or the device is not there (yet), the
# disk is full, memory ran short, the server hung or ended, the other of two machines serves
# something else (yet).
EX_DATAERR = 65
"""The hub sends what it does not list, or nonsense: each restart would download it again."""
EX_NOINPUT = 66
EX_NOHOST = 68
EX_UNAVAILABLE = 69
EX_OSERR = 71
EX_CANTCREAT = 73
EX_TEMPFAIL = 75
EX_PROTOCOL = 76
EX_CONFIG = 78
"""Something to correct: no restart changes it."""


class StartError(Exception):
    """No server can be started; the message says what to do, ``code`` is the exit code."""

    def __init__(self, text: str, code: int = EX_CONFIG) -> None:
        super().__init__(text)
        self.code = code
