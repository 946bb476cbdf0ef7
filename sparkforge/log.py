"""The only module that prints.

One ``log`` object for the whole program: stages with timings, progress of long work, notes
and warnings. Human text goes to stderr when ``--json`` owns stdout, else to stdout. Colour
and redrawn progress lines appear on a terminal only; CI systems get foldable groups instead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

_PROGRESS_EVERY_S = 0.1
_PROGRESS_EVERY_S_PLAIN = 5.0  # without a terminal each report is a line of its own
_WIDTH = 78


class Log:
    """Steps, progress and messages. State: the output stream and what is open on it."""

    def __init__(self) -> None:
        self.stream: IO[str] = sys.stdout
        self.verbose = False
        self._started = time.monotonic()
        self._progress_at = 0.0
        self._progress_open = False
        self._group_open = False

    def configure(self, *, to_stderr: bool, verbose: bool) -> None:
        """Choose the stream (stderr where stdout carries JSON) and how much is said."""
        self.stream = sys.stderr if to_stderr else sys.stdout
        self.verbose = verbose

    # -- what it looks like -------------------------------------------------

    @property
    def tty(self) -> bool:
        return self.stream.isatty() and os.environ.get("TERM") != "dumb"

    def _paint(self, code: str, text: str) -> str:
        # https://no-color.org: any non-empty value switches colour off
        if not self.tty or os.environ.get("NO_COLOR"):
            return text
        return f"\033[{code}m{text}\033[0m"

    def _line(self, text: str = "") -> None:
        if self._progress_open:
            self.stream.write("\r\033[K")
            self._progress_open = False
        self.stream.write(text + "\n")
        self.stream.flush()

    # -- messages -----------------------------------------------------------

    def info(self, text: str) -> None:
        self._line(f"  {text}")

    def detail(self, text: str) -> None:
        """Say what only ``--verbose`` users want: the commands that are run, for one."""
        if self.verbose:
            self._line(self._paint("2", f"  {text}"))

    def warning(self, text: str) -> None:
        self._line(self._paint("33", "  warning: ") + text)
        if os.environ.get("GITHUB_ACTIONS"):
            self._line("::warning::" + text.replace("\n", "%0A"))

    def error(self, text: str) -> None:
        # errors go to stderr whatever stdout is for
        if self._progress_open:
            self._line()
        self.end_group()
        sys.stderr.write(self._paint("31;1", "error: ") + text + "\n")
        sys.stderr.flush()

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

    def json(self, value: Any) -> None:
        """Write one JSON document to stdout, whatever the human text goes to."""
        sys.stdout.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        sys.stdout.flush()

    def raw(self, text: str) -> None:
        """Pass a child's line through as it came."""
        self._line(self._paint("2", "  | ") + text)

    # -- steps and progress -------------------------------------------------

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A stage: a heading, what it says, and a closing line with the seconds it took."""
        if os.environ.get("GITHUB_ACTIONS"):
            self._line(f"::group::{name}")
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
            self.stream.write("::endgroup::\n")
            self._group_open = False

    def progress(self, what: str, done: float, total: float | None, unit: str = "B") -> None:
        """Report progress; called as often as convenient, drawn a few times a second.

        Args:
            what: a short name of the work.
            done, total: amounts in ``unit``; total None where it is not known.
            unit: "B" prints binary sizes, "s" seconds, else a count.
        """
        now = time.monotonic()
        finished = total is not None and done >= total
        wait = _PROGRESS_EVERY_S if self.tty else _PROGRESS_EVERY_S_PLAIN
        if now - self._progress_at < wait and not (finished and self._progress_open):
            return
        self._progress_at = now
        amount = _amount(done, unit) + (f" of {_amount(total, unit)}" if total else "")
        share = f" {100 * done / total:3.0f}%" if total else ""
        if self.tty:
            self.stream.write(f"\r\033[K  {what}: {amount}{share}")
            self.stream.flush()
            self._progress_open = True
        else:
            self._line(f"  {what}: {amount}{share}")


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


log = Log()
