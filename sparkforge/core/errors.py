"""All expected errors, each with its own exit code.

A message says what is wrong, where, and how to fix it.
``cli.main`` prints it and exits with ``exit_code``; a traceback is shown only for
errors that are not one of these, because those are bugs in sparkforge itself.
"""

from __future__ import annotations


class SparkforgeError(Exception):
    """Base of all expected failures.

    Args:
        what: one sentence: the problem and its place.
        remedy: the hint: the user's next step, or "".

    Attributes:
        meaning: of the exit code, for ``--exit-codes``.
    """

    exit_code = 1
    meaning = "A bug in sparkforge; please report the traceback."

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

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
    meaning = "pins.yaml, or a file that it names, is invalid."


class FetchError(SparkforgeError):
    exit_code = 4
    meaning = "An input is not available: no network, offline, not in the index, wrong mirror."


class IntegrityError(SparkforgeError):
    exit_code = 5
    meaning = "A download or result differs from its pin."


class SeriesError(SparkforgeError):
    exit_code = 6
    meaning = "A patch is malformed, does not apply exactly, or is missing from its series."


class WheelError(SparkforgeError):
    exit_code = 7
    meaning = "A wheel cannot be built from these inputs."


class EngineError(SparkforgeError):
    exit_code = 8
    meaning = "The container engine is missing, too old, or reports an error."


class ImageError(SparkforgeError):
    exit_code = 9
    meaning = "The image or the virtual environment could not be built."


class SmokeError(SparkforgeError):
    exit_code = 10
    meaning = "The build fails its smoke test."


class StoreError(SparkforgeError):
    exit_code = 11
    meaning = "The store or another file cannot be read or written (disk full, permissions)."


class CommandError(SparkforgeError):
    exit_code = 12
    meaning = "A program that sparkforge runs failed unexpectedly."


class MachineError(SparkforgeError):
    exit_code = 13
    meaning = "The machine lacks a program that sparkforge needs (Python, git)."


class StaleError(SparkforgeError):
    exit_code = 14
    meaning = "A generated file of the checkout is out of date."


class QualityError(SparkforgeError):
    exit_code = 15
    meaning = "A measurement is beyond its limit."


class AblationError(SparkforgeError):
    exit_code = 16
    meaning = "A test passes without its patch, or no patch makes a difference."


class ProofError(SparkforgeError):
    exit_code = 17
    meaning = "The machine code differs from what a proof requires."


class DoctorError(SparkforgeError):
    exit_code = 18
    meaning = "This machine cannot build or serve the target; see the findings."


class RebaseStopped(SparkforgeError):
    exit_code = 19
    meaning = (
        "A patch does not apply to the new release, or a move to it fails; resolve it by hand."
    )


class VerifyError(SparkforgeError):
    exit_code = 20
    meaning = (
        "Two builds differ, an image was not built from this checkout, a signature is missing or"
        " wrong, or a build is not ready for a release."
    )


class WatchNews(SparkforgeError):
    exit_code = 22
    meaning = "watch: an upstream has a newer release, and every series applies to it."


class WatchConflict(SparkforgeError):
    exit_code = 24
    meaning = "watch: an upstream has a newer release, and a patch needs work."


class CompileError(SparkforgeError):
    exit_code = 23
    meaning = "A wheel cannot be compiled, or its compile failed."


class PortError(SparkforgeError):
    exit_code = 25
    meaning = "The server's port is in use."


class AcceptError(SparkforgeError):
    exit_code = 26
    meaning = "A running server fails a check of accept, or does not answer."


class BenchError(SparkforgeError):
    exit_code = 27
    meaning = "bench: no server answers as expected, or a result cannot be read or compared."


class RegressionError(SparkforgeError):
    exit_code = 28
    meaning = "bench compare: the second result is slower than the first."


INTERRUPTED_EXIT_CODE = 130
"""Ctrl-C or SIGTERM; 128 + SIGINT, the shell's own convention."""


def exit_codes() -> list[tuple[int, str]]:
    """Return (code, meaning) for every failure kind, in order; docs and ``--help`` print it."""
    kinds: list[type[SparkforgeError]] = [SparkforgeError, *SparkforgeError.__subclasses__()]
    rows = [(kind.exit_code, kind.meaning) for kind in kinds]
    rows += [
        (0, "Success."),
        (INTERRUPTED_EXIT_CODE, "Interrupted; the next run continues from here."),
    ]
    return sorted(rows)
