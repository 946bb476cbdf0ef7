"""All expected errors, each with its own exit code.

A message says what is wrong, where, and how to fix it. ``cli.main`` prints it; a traceback is shown
only for other errors: those are bugs in sparkforge.
"""


class SparkforgeError(Exception):
    """Base of all expected failures: the problem with its place, and the user's next step or ""."""

    exit_code = 1
    meaning = "A bug in sparkforge; please report the traceback."

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy

    def as_json(self) -> dict[str, str | int]:
        """Return the document that ``--json`` prints."""
        return {"exit_code": self.exit_code, "what": self.what, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.what}\n  hint: {self.remedy}" if self.remedy else self.what


class UsageError(SparkforgeError):
    exit_code = 2
    meaning = "Invalid or conflicting command-line options."


class PinsError(SparkforgeError):
    exit_code = 3
    meaning = "pins.yaml or another file of the checkout is invalid or out of date."


class FetchError(SparkforgeError):
    exit_code = 4
    meaning = "An input is not available: no network, offline, not in the index or registry."


class IntegrityError(SparkforgeError):
    exit_code = 5
    meaning = "A download or result differs from its pin."


class SeriesError(SparkforgeError):
    exit_code = 6
    meaning = "A patch is malformed, does not apply exactly, or needs work for a newer release."


class BuildError(SparkforgeError):
    exit_code = 7
    meaning = "A wheel, an image or a virtual environment cannot be built."


class MachineError(SparkforgeError):
    exit_code = 8
    meaning = "The machine lacks a program or a container engine, or the port is in use."


class CheckError(SparkforgeError):
    exit_code = 9
    meaning = "A check failed: doctor, verify, sign, release, ablate, quality, compare, watch."


class ServerError(SparkforgeError):
    exit_code = 10
    meaning = "A server fails its smoke test, accept or bench, or does not answer."


class StoreError(SparkforgeError):
    exit_code = 11
    meaning = "The store or another file cannot be read or written (disk full, permissions)."


class CommandError(SparkforgeError):
    exit_code = 12
    meaning = "A program that sparkforge runs failed unexpectedly."


class Interrupted(SparkforgeError):
    exit_code = 130  # of Ctrl-C and SIGTERM: 128 + SIGINT, the shell's own convention
    meaning = "Interrupted; the next run continues from here."


class RebaseStopped(SeriesError):
    """A rebase waits for a conflict to be resolved."""


def exit_codes() -> list[tuple[int, str]]:
    """Return (code, meaning) for every failure kind, in order."""
    kinds: list[type[SparkforgeError]] = [SparkforgeError, *SparkforgeError.__subclasses__()]
    return [(0, "Success."), *((kind.exit_code, kind.meaning) for kind in kinds)]
