"""The only module that prints.

One ``log`` object for the whole program. Text goes to stderr with ``--json``, else to stdout;
errors go to stderr. Colour is for terminals only.
"""

import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sparkforge.core import plain
from sparkforge.core.errors import SparkforgeError, StoreError

_PROGRESS_EVERY_S = 5.0
# users and passwords of addresses (as in serving/options.py), PINs of pkcs11: URIs (RFC 7512)
_SECRET = re.compile(
    r"(?<=://)(?:[^/\s\"'<>]+|[^/@:\s\"'<>]+:(?!\d{1,5}/)[^\s\"'<>]*)(?=@)"
    r"|(?<=\bpin-value=)[^&\s\"'<>]+"
    # what httpx and urllib call the port of an address whose password has a slash
    r"|(?<=Invalid port: ')[^']*|(?<=integer value as ')[^']*"
)


class Log:
    """Steps, progress and messages."""

    def __init__(self) -> None:
        self.verbose = self._to_stderr = False
        self._answered = False  # whether stdout has its JSON document
        self._progress_at = time.monotonic()

    def configure(self, *, to_stderr: bool, verbose: bool) -> None:
        """Choose the stream (stderr if stdout has JSON) and the verbosity."""
        self._to_stderr, self.verbose, self._answered = to_stderr, verbose, False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # a locale without ✓, or an undecodable file name, must not end the build
                stream.reconfigure(errors="replace")

    def _line(self, text: str, colour: str = "") -> None:
        """Print a text, on a terminal in a colour (SGR code)."""
        stream, text = sys.stderr if self._to_stderr else sys.stdout, _tame(text)
        # https://no-color.org: any non-empty value switches colour off
        never = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if colour and stream.isatty() and not never:
            text = f"\033[{colour}m{text}\033[0m"
        self._write(stream, f"{text}\n")

    def _write(self, stream: IO[str], text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # the rest of the buffer is written again at the exit
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            # without a reader (head, less), or with stderr on a full disk, the build continues
            if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
                self._answered = True  # no document can follow
                msg = f"standard output: {error.strerror}"
                raise StoreError(msg, "free space where it is written") from error

    def info(self, text: str, colour: str = "") -> None:
        self._line(f"  {text}", colour)

    def detail(self, text: str) -> None:
        """Print a detail for ``--verbose``, such as a command."""
        if self.verbose:
            self._line(f"  {text}", "2")

    def warning(self, text: str) -> None:
        self._line(f"  warning: {text}", "33")

    def error(self, text: str, hint: str = "") -> None:
        lines = "\n  hint: ".join(_tame(part) for part in (text, hint) if part)
        self._write(sys.stderr, f"error: {lines}\n")

    def failure(self, error: SparkforgeError) -> int:
        """Print an error, and its document unless there was one; returns its exit code."""
        self.error(error.what, error.remedy)
        if not self._answered:
            self.document({"error": error.as_json()})
        return error.exit_code

    def traceback(self) -> None:
        """Print the current exception with its traceback to stderr."""
        self._write(sys.stderr, _SECRET.sub("***", traceback.format_exc()))

    def heading(self, text: str) -> None:
        self._line(text, "1")

    def table(self, rows: Sequence[tuple[str, ...]]) -> None:
        """Print rows in columns as wide as their widest cell."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._line("  " + "  ".join(cells).rstrip())

    def document(self, value: Any) -> None:
        """Write a command's document to stdout; without --json, do nothing."""
        if self._to_stderr:
            self._answered = True
            text = json.dumps(value, indent=2, sort_keys=True)
            self._write(sys.stdout, _SECRET.sub("***", text) + "\n")

    def raw(self, text: str) -> None:
        """Print a child's line."""
        self._line(f"  | {text}", "2")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a stage: a heading, its messages, and a last line with its seconds."""
        self._line(name, "1;34")
        start, mark, colour = time.monotonic(), "✗", "31"
        try:
            yield
            mark, colour = "✓", "32"
        finally:
            self._line(f"{mark} {name}  {time.monotonic() - start:.2f}s", colour)

    def progress(self, text: str) -> None:
        """Report progress; printed every few seconds."""
        if time.monotonic() - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = time.monotonic()
            self.info(text)


def _tame(text: str) -> str:
    """Return a text as one message: no secrets, no control characters.

    Further lines are marked, so none looks like another message, or, in its runner's logs, like a
    command to GitHub: ``::`` after spaces, ``##[`` anywhere.
    """
    text = plain.escaped(_SECRET.sub("***", text), keep="\n\t")
    text = text.replace("##[", "# #[").replace("\n", "\n  | ")
    return f"  | {text}" if text.lstrip().startswith("::") else text


def human_bytes(size: float) -> str:
    """Return a size in binary units, e.g. ``1.5 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, e.g. ``1 module`` or ``2 modules``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


log = Log()
