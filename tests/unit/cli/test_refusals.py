"""What the machine refuses, and files that are none: one error each, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from sparkforge.cli.main import main
from sparkforge.core.log import log
from tests.support import PATIENCE_S, ROOT


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Run main() with --json; return the error's words."""
    assert main([*words, "--json"]) == code
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err
    return str(json.loads(seen.out)["error"]["what"])


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("file", ["/some/file", None])
def test_what_the_system_refuses_is_told_with_a_remedy(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    file: str | None,
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number), file)

    monkeypatch.setattr("sparkforge.pins.pins.load", refuse)
    prefix = f"{file}: " if file else ""
    assert refused(capsys, 11, "pins", "check") == f"{prefix}{os.strerror(number)}"


def test_a_full_stderr_changes_neither_code_nor_document() -> None:
    command = '"$0" -m sparkforge patches list nobody --json 2>/dev/full'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_nothing_that_is_shown_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2Jb\rc\x9bd\u202ee\x1b]0;title\x07"
    for say in (log.info, log.warning, log.heading, log.error, log.raw, log.raw_progress):
        say(hostile)
    log.table([(hostile, "x")])
    with log.step(hostile):
        log.progress(hostile, 1, 2)
    seen = capsys.readouterr()
    for shown in (seen.out, seen.err):
        assert r"a\x1b[2Jb\rc\x9bd\u202ee\x1b]0;title\x07" in shown
        assert not set(shown) & set("\x1b\r\x9b\u202e\x07")
