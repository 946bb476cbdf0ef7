"""Exit codes of the entrypoint, the errors that end a start with one, and its log lines."""

import sys

# sysexits.h. A restart may fix all but 65 and 78.
EX_DATAERR = 65  # the hub sends other bytes than it lists: each restart would download them again
EX_NOINPUT = 66
EX_NOHOST = 68
EX_UNAVAILABLE = 69
EX_OSERR = 71
EX_CANTCREAT = 73
EX_TEMPFAIL = 75
EX_PROTOCOL = 76
EX_CONFIG = 78  # a setting is wrong: no restart changes it


class StartError(Exception):
    """The server cannot be started. The message has a hint, ``code`` is the exit code."""

    def __init__(self, text: str, code: int = EX_CONFIG) -> None:
        super().__init__(text)
        self.code = code


class SettingError(StartError):
    """A setting cannot be used: ``what`` is wrong, and a ``hint`` what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}: {hint}")
        self.what, self.hint = what, hint


def say(text: str) -> None:
    """Print a line between the server's, in the container's log."""
    print(f"entrypoint: {text}", file=sys.stderr, flush=True)
