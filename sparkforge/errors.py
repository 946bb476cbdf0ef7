"""Every failure that a user can meet, each with its own exit code.

A message answers three questions: what is wrong, where, and how to fix it.
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
        """Return what ``--json`` prints of it."""
        return {"exit_code": self.exit_code, "what": self.what, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.what}\n  hint: {self.remedy}" if self.remedy else self.what


class UsageError(SparkforgeError):
    """The words on the command line make no sense together."""

    exit_code = 2


class PinsError(SparkforgeError):
    """pins.yaml (or a file it names) is wrong."""

    exit_code = 3


class FetchError(SparkforgeError):
    """An input could not be had: no network, offline, not in the index, wrong mirror."""

    exit_code = 4


class IntegrityError(SparkforgeError):
    """Something was fetched or made, and it is not what the pins promise."""

    exit_code = 5


class SeriesError(SparkforgeError):
    """A patch is malformed, does not apply exactly, or files and series disagree."""

    exit_code = 6


class WheelError(SparkforgeError):
    """A wheel can't be made from these inputs."""

    exit_code = 7


class EngineError(SparkforgeError):
    """The container engine is absent, too old, or refuses."""

    exit_code = 8


class ImageError(SparkforgeError):
    """The image or the plain environment could not be made."""

    exit_code = 9


class SmokeError(SparkforgeError):
    """What was built does not serve as promised."""

    exit_code = 10


class StoreError(SparkforgeError):
    """The store, or another file, can't be read or written (disk full, permissions)."""

    exit_code = 11


class CommandError(SparkforgeError):
    """A program that sparkforge runs ended with an error nobody foresaw."""

    exit_code = 12


class MachineError(SparkforgeError):
    """The machine lacks something that sparkforge itself needs (python, git)."""

    exit_code = 13


class StaleError(SparkforgeError):
    """A generated file of the checkout is not what it would be now."""

    exit_code = 14


class QualityError(SparkforgeError):
    """What was measured lies beyond the limits that were asked for."""

    exit_code = 15


class AblationError(SparkforgeError):
    """A test does not notice that its patch is left out, or no patch makes a difference."""

    exit_code = 16


class ProofError(SparkforgeError):
    """Machine code is not what a proof promises."""

    exit_code = 17


class DoctorError(SparkforgeError):
    """This machine would not build or serve the target; the findings say why."""

    exit_code = 18


class RebaseStopped(SparkforgeError):
    """A patch does not move to the new release by itself: a person is needed."""

    exit_code = 19


class VerifyError(SparkforgeError):
    """Two builds differ, or an image is not what this checkout makes."""

    exit_code = 20


class SignError(SparkforgeError):
    """cosign is not there, or refuses to sign or to check."""

    exit_code = 21


class WatchNews(SparkforgeError):
    """watch: an upstream has a newer release, and every series carries over by itself."""

    exit_code = 22


class WatchConflict(SparkforgeError):
    """watch: an upstream has a newer release, and a person must carry a patch over."""

    exit_code = 24


class CompileError(SparkforgeError):
    """A wheel can't be compiled, or its compile failed."""

    exit_code = 23


class PortError(SparkforgeError):
    """The port that a server should listen on is taken."""

    exit_code = 25


INTERRUPTED_EXIT_CODE = 130
"""Ctrl-C or SIGTERM; 128 + SIGINT, the shell's own convention."""


def exit_codes() -> list[tuple[int, str]]:
    """Return (code, meaning) for every failure kind, in order; docs and ``--help`` print it."""
    kinds: list[type[SparkforgeError]] = [SparkforgeError, *SparkforgeError.__subclasses__()]
    rows = [(kind.exit_code, (kind.__doc__ or "").strip().splitlines()[0]) for kind in kinds[1:]]
    rows += [
        (0, "All well."),
        (1, "A bug in sparkforge: a traceback is shown, please report it."),
        (INTERRUPTED_EXIT_CODE, "Interrupted; the next run goes on where this one stopped."),
    ]
    return sorted(rows)
