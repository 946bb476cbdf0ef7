"""vLLM's output → the reason why it did not start, in at most ten lines.

vLLM prefixes each line with its process, ``(EngineCore_DP0 pid=7)``, and most with level, time and
source. When the engine fails, the API server fails after it, so the log ends with a traceback that
only says "see root cause above".
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LINES = 10
_CONTEXT = 6  # the last three frames: each is a place and its source line
_WORDS = 300  # characters of an exception; some print a whole configuration
_WIDTH = 160  # without a terminal
_LINE = re.compile(
    r"(?:[\w.-]+ +\| )?"  # Compose's, before a container's lines
    r"(?:\((?P<process>[^()]*?) pid=\d+\) ?)?"
    r"(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?(?P<text>.*)"
)
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?::|$)")
_TRACEBACK = "Traceback (most recent call last):"
_DIED = "died unexpectedly"  # vLLM's message for a worker that a signal ended
_OUTER = "APIServer"
# printed at the end of a killed process, one line for each object
_NOISE = re.compile(r"nanobind: |\s*- leaked |\s*\^+$|$")


@dataclass(frozen=True)
class Failure:
    """The first exception of a process."""

    process: str
    """vLLM's name of it, or ""."""
    words: str
    """The exception, or vLLM's sentence about a dead process, on one line."""
    context: tuple[str, ...] = ()
    """Lines of its traceback before it."""


def first_failure(text: str) -> Failure | None:
    """Return the first exception of an engine or worker, else of any process, else None."""
    rows = [_row(line) for line in text.splitlines()]
    inner = [row for row in rows if row[0] and not row[0].startswith(_OUTER)]
    return _first(inner) or _first(rows)


def _row(line: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    return (found["process"] or "", found["text"]) if found else ("", line)


def _first(rows: Sequence[tuple[str, str]]) -> Failure | None:
    frames: dict[str, list[str]] = {}  # of processes that are within a traceback
    for at, (process, text) in enumerate(rows):
        if text.startswith(_TRACEBACK):
            frames[process] = []
        elif _DIED in text:
            return Failure(process, text.strip()[:_WORDS])
        elif process in frames and _EXCEPTION.match(text):
            # pydantic's exceptions have their details on the next lines, indented
            more = [line.strip() for _, line in rows[at + 1 : at + 3] if line.startswith("  ")]
            words = " ".join([text.strip(), *(more if text.endswith(("Config", ":")) else [])])
            return Failure(process, words[:_WORDS], tuple(frames[process][-_CONTEXT:]))
        elif process in frames and not _NOISE.fullmatch(text):
            frames[process].append(re.sub(r'"\S*/site-packages/', '"', text.rstrip()))
    return None


def explain(text: str, lines: int = LINES) -> str:
    """Return why a server failed, indented: its first exception with place, else its last lines.

    Args:
        lines: the maximum number.
    """
    failure = first_failure(text)
    if failure is None:
        kept = [line for line in text.splitlines() if not _NOISE.match(line)]
        shown = kept[-lines:]
        first: list[str] = []
    else:
        first = [f"{failure.process}: {failure.words}" if failure.process else failure.words]
        shown = list(failure.context[-(lines - 1) :]) if lines > 1 else []
    width = shutil.get_terminal_size((_WIDTH, 24)).columns - 4
    return "\n".join(f"    {line}" for line in [*first, *(_cut(line, width) for line in shown)])


def ending(code: int) -> str:
    """Describe the end of a process: its exit code, or the signal that ended it.

    Args:
        code: as ``subprocess`` has it, minus the signal's number; a container's is 128 more.
    """
    number = -code if code < 0 else code - 128
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"exited with code {code}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
