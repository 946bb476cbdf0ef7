"""All expected errors, each with its own exit code.

A message says what is wrong, where, and how to fix it.
``cli.main`` prints it and exits with ``exit_code``; a traceback is shown only for
errors that are not one of these, because those are bugs in sparkforge itself.
"""

from __future__ import annotations


class SparkforgeError(Exception):
    """Base of all expected failures.

    Args:
        what: one sentence, what is wrong and where.
        remedy: what the user does next; empty where nothing can be done.
    """

    exit_code = 1

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
    """Invalid or conflicting command-line options."""

    exit_code = 2


class PinsError(SparkforgeError):
    """pins.yaml, or a file that it names, is invalid."""

    exit_code = 3


class FetchError(SparkforgeError):
    """An input is not available: no network, offline, not in the index, wrong mirror."""

    exit_code = 4


class IntegrityError(SparkforgeError):
    """A download or result differs from its pin."""

    exit_code = 5


class SeriesError(SparkforgeError):
    """A patch is malformed, does not apply exactly, or is missing from its series."""

    exit_code = 6


class WheelError(SparkforgeError):
    """A wheel cannot be built from these inputs."""

    exit_code = 7


class EngineError(SparkforgeError):
    """The container engine is missing, too old, or reports an error."""

    exit_code = 8


class ImageError(SparkforgeError):
    """The image or the virtual environment could not be built."""

    exit_code = 9


class SmokeError(SparkforgeError):
    """The build fails its smoke test."""

    exit_code = 10


class StoreError(SparkforgeError):
    """The store or another file cannot be read or written (disk full, permissions)."""

    exit_code = 11


class CommandError(SparkforgeError):
    """A program that sparkforge runs failed unexpectedly."""

    exit_code = 12


class MachineError(SparkforgeError):
    """The machine lacks a program that sparkforge needs (Python, git)."""

    exit_code = 13


class StaleError(SparkforgeError):
    """A generated file of the checkout is out of date."""

    exit_code = 14


class QualityError(SparkforgeError):
    """A measurement is beyond its limit."""

    exit_code = 15


class AblationError(SparkforgeError):
    """A test passes without its patch, or no patch makes a difference."""

    exit_code = 16


class ProofError(SparkforgeError):
    """The machine code differs from what a proof requires."""

    exit_code = 17


class DoctorError(SparkforgeError):
    """This machine cannot build or serve the target; see the findings."""

    exit_code = 18


class RebaseStopped(SparkforgeError):
    """A patch does not apply to the new release; resolve it by hand."""

    exit_code = 19


class VerifyError(SparkforgeError):
    """Two builds differ, or an image was not built from this checkout."""

    exit_code = 20


class SignError(SparkforgeError):
    """cosign is missing, or fails to sign or to verify."""

    exit_code = 21


class WatchNews(SparkforgeError):
    """watch: an upstream has a newer release, and every series applies to it."""

    exit_code = 22


class WatchConflict(SparkforgeError):
    """watch: an upstream has a newer release, and a patch needs work."""

    exit_code = 24


class CompileError(SparkforgeError):
    """A wheel cannot be compiled, or its compile failed."""

    exit_code = 23


class PortError(SparkforgeError):
    """The server's port is in use."""

    exit_code = 25


INTERRUPTED_EXIT_CODE = 130
"""Ctrl-C or SIGTERM; 128 + SIGINT, the shell's own convention."""


def exit_codes() -> list[tuple[int, str]]:
    """Return (code, meaning) for every failure kind, in order; docs and ``--help`` print it."""
    kinds: list[type[SparkforgeError]] = [SparkforgeError, *SparkforgeError.__subclasses__()]
    rows = [(kind.exit_code, (kind.__doc__ or "").strip().splitlines()[0]) for kind in kinds[1:]]
    rows += [
        (0, "Success."),
        (1, "A bug in sparkforge; please report the traceback."),
        (INTERRUPTED_EXIT_CODE, "Interrupted; the next run continues from here."),
    ]
    return sorted(rows)
