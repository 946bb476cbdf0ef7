"""The only module that prints.

One ``log`` object for the whole program: stages with timings, progress of long work, notes
and warnings. Text goes to stderr with ``--json``, else to stdout. Colour and the progress bar, by
rich on stderr, are for terminals only; CI systems get foldable groups instead.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from sparkforge.core import plain
from sparkforge.core.errors import SparkforgeError, StoreError

if TYPE_CHECKING:
    from rich.progress import Progress

_PROGRESS_EVERY_S_PLAIN = 15.0  # without a terminal each report is a new line
_WIDTH = 78
# until ``configure`` sets the exact pattern: it hides too much rather than too little
_IN_URL = re.compile(r"(?<=://)[^\s\"'<>]*@")
_PIN = re.compile(r"(?<=\bpin-value=)[^&\s]+")  # of a pkcs11: URI (RFC 7512)
_COLOUR = re.compile(r"(\033\[[0-9;]*m)")


class Log:
    """Steps, progress and messages. State: the stream and its open step."""

    def __init__(self) -> None:
        self.verbose = False
        self.answered = False  # whether stdout has its JSON document
        self._to_stderr = False
        self._in_url = _IN_URL
        self._started = time.monotonic()
        self._progress_at = 0.0
        self._bar: Progress | None = None
        self._bar_lock = threading.RLock()
        self._group_open = False

    def configure(
        self, *, to_stderr: bool, verbose: bool, mask: re.Pattern[str] | None = None
    ) -> None:
        """Choose the stream (stderr if stdout has JSON) and the verbosity.

        Args:
            mask: pattern of users and passwords in addresses, which are not printed.
        """
        self._to_stderr = to_stderr
        self.verbose = verbose
        self._in_url = mask or self._in_url
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # a locale without ✓, or an undecodable file name, must not end the build
                stream.reconfigure(errors="replace")

    # -- appearance -------------------------------------------------

    @property
    def stream(self) -> IO[str]:
        return sys.stderr if self._to_stderr else sys.stdout

    def _paint(self, code: str, text: str, stream: IO[str] | None = None) -> str:
        # https://no-color.org: any non-empty value switches colour off
        if not _is_terminal(stream or self.stream) or os.environ.get("NO_COLOR"):
            return text
        return f"\033[{code}m{text}\033[0m"

    def painted(self, code: str, text: str) -> str:
        """Return a text in a colour (SGR code) on a terminal, else unchanged."""
        return self._paint(code, text)

    def _line(self, text: str = "") -> None:
        self.end_progress()
        _write(self.stream, f"{_tame(self._masked(text))}\n")

    # -- messages -----------------------------------------------------------

    def info(self, text: str) -> None:
        self._line(f"  {text}")

    def detail(self, text: str) -> None:
        """Print a detail for ``--verbose``, such as a command."""
        if self.verbose:
            self._line(self._paint("2", f"  {text}"))

    def warning(self, text: str) -> None:
        text = plain.escaped(text, keep="\n\t")
        self._line(self._paint("33", "  warning: ") + text)
        if os.environ.get("GITHUB_ACTIONS"):
            escaped = self._masked(text).replace("%", "%25").replace("\n", "%0A")
            _write(self.stream, f"::warning::{escaped}\n")

    def error(self, text: str, hint: str = "") -> None:
        # errors always go to stderr
        self.end_progress()
        self.end_group()
        head = self._paint("31;1", "error: ", sys.stderr)
        parts = (plain.escaped(self._masked(part), keep="\n\t") for part in (text, hint) if part)
        _write(sys.stderr, head + "\n  hint: ".join(map(_tame, parts)) + "\n")

    def failure(self, error: SparkforgeError) -> int:
        """Print an error with its hint; returns its exit code."""
        self.error(error.what, error.remedy)
        return error.exit_code

    def traceback(self) -> None:
        """Print the current exception with its traceback to stderr."""
        self.end_progress()
        _write(sys.stderr, self._masked(traceback.format_exc()))

    def heading(self, text: str) -> None:
        self._line(self._paint("1", text))

    def table(self, rows: list[tuple[str, ...]]) -> None:
        """Print rows in columns as wide as their widest cell."""
        if not rows:
            return
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._line("  " + "  ".join(cells).rstrip())

    def document(self, value: Any) -> None:
        """Write a command's document to stdout; without --json, do nothing."""
        if self._to_stderr:
            self.json(value)

    def json(self, value: Any) -> None:
        """Write one JSON document to stdout."""
        self.end_progress()
        self.answered = True
        _write(sys.stdout, json.dumps(_clean(value, self._masked), indent=2, sort_keys=True) + "\n")

    def usage(self, text: str) -> None:
        """Print usage to stderr, unchanged."""
        _write(sys.stderr, text)

    def raw(self, text: str) -> None:
        """Print a child's line unchanged."""
        self._line(self._paint("2", "  | ") + text)

    def raw_progress(self, text: str) -> None:
        """Print a line that the child overwrites; without a terminal only now and then."""
        if _is_terminal(sys.stderr):
            self._show(text, 0, None, "")
        elif not self._too_early():
            self.raw(text)

    # -- steps and progress -------------------------------------------------

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print a stage: a heading, its messages, and a last line with its seconds."""
        if os.environ.get("GITHUB_ACTIONS"):
            _write(self.stream, f"::group::{name}\n")
            self._group_open = True
        self._line(self._paint("1;34", name))
        start = time.monotonic()
        ok = False
        try:
            yield
            ok = True
        finally:
            took = f"{time.monotonic() - start:.2f}s"
            mark = self._paint("32", "✓") if ok else self._paint("31", "✗")
            pad = " " * max(1, _WIDTH - len(name) - len(took) - 4)
            self._line(f"{mark} {name}{pad}{took}")
            self.end_group()

    def end_group(self) -> None:
        if self._group_open:
            self._group_open = False
            _write(self.stream, "::endgroup::\n")

    def progress(
        self, what: str, done: float, total: float | None, unit: str = "B", note: str = ""
    ) -> None:
        """Report progress; called as often as convenient, drawn a few times a second.

        Args:
            done, total: amounts in ``unit``; total None if unknown.
            unit: "B" prints binary sizes, "s" seconds, else a count.
            note: at the end of the line.
        """
        amount = _amount(done, unit) + (f" of {_amount(total, unit)}" if total else "")
        if _is_terminal(sys.stderr):
            self._show(what, done, total, f"{amount}  {note}".rstrip())
        elif not self._too_early():
            share = f" {100 * done / total:3.0f}%" if total else ""
            self._line(f"  {what}: {amount}{share}{f'  {note}' if note else ''}")

    def _show(self, what: str, done: float, total: float | None, amount: str) -> None:
        """Draw the progress bar; another line removes it."""
        what, amount = _tame(self._masked(what)), _tame(self._masked(amount))
        with self._bar_lock:
            if self._bar is None:
                self._bar = _new_bar()
                self._bar.add_task(what, total=total, amount=amount)
                self._bar.start()
            (task,) = self._bar.task_ids
            if self._bar.tasks[0].description.partition(" (")[0] != what.partition(" (")[0]:
                self._bar.reset(task)  # other work: its own remaining time
            self._bar.update(task, total=total, completed=done, description=what, amount=amount)
            if total is not None and done >= total:
                self.end_progress()

    def end_progress(self) -> None:
        """Remove the progress bar."""
        with self._bar_lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _masked(self, text: str) -> str:
        """Return a text without users and passwords of addresses and PINs of PKCS#11 keys."""
        return _PIN.sub("***", self._in_url.sub("", text))

    def _too_early(self) -> bool:
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_EVERY_S_PLAIN:
            return True
        self._progress_at = now
        return False


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(20),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _write(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # the rest of the buffer is written again at the exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        # the reader has ended (head, less), or the disk of stderr's file is full. The build
        # continues without a log; the exit code and --json show its result
        if not isinstance(error, BrokenPipeError) and stream is not sys.stderr:
            log.answered = True  # no document can follow
            msg = f"standard output: {error.strerror}"
            raise StoreError(msg, "free space where it is written") from error


def _tame(text: str) -> str:
    """Return a text as one message: no control characters but colours, and further lines marked.

    Whatever name or output it holds, none of its lines looks like another message, or like a
    command to GitHub's runner: ``::`` after spaces, ``##[`` anywhere.
    """
    text = "".join(
        part if _COLOUR.fullmatch(part) else plain.escaped(part, keep="\n\t")
        for part in _COLOUR.split(text)
    )
    text = text.replace("##[", "# #[").replace("\n", "\n  | ")
    return f"  | {text}" if text.lstrip().startswith("::") else text


def _clean(value: Any, masked: Callable[[str], str]) -> Any:
    """Return a JSON value without secrets in its texts."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {_clean(key, masked): _clean(item, masked) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, masked) for item in value]
    return value


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return human_bytes(value)
    return f"{value:.0f} {unit}".rstrip() if unit != "s" else f"{value:.0f}s"


def human_bytes(size: float) -> str:
    """Return a size in binary units, e.g. ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, e.g. ``1 module`` or ``2 modules``.

    Args:
        plural: the noun's; by default with an s.
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


log = Log()
atexit.register(log.end_progress)  # it hides the cursor
