"""What the machine refuses, and files that are none: one error each, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.cli.main import main
from sparkforge.core.errors import MachineError
from sparkforge.core.log import log
from sparkforge.core.run import call
from tests.support import PATIENCE_S, ROOT


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Run main() with --json; return the error's words."""
    assert main([*words, "--json"]) == code
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err
    return str(json.loads(seen.out)["error"]["what"])


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE])
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


@pytest.mark.parametrize("words", [["pins", "check", "--pins"], ["clean", "--store"]])
def test_a_link_to_itself_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code = 2 if words[0] == "clean" else 11
    assert "loop" in refused(capsys, code, *words, str(tmp_path / "loop"))


def test_an_empty_home_is_no_place_for_the_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert "no folder for the store" in refused(capsys, 2, "clean")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code"), [(["doctor", "--target", "cpu", "--readings"], 2), (["verify"], 2)]
)
def test_json_that_nests_without_end_is_no_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], code: int
) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    assert "deep.json" in refused(capsys, code, *words, str(path))


def test_a_git_that_is_no_program_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_bytes(b"\x7fELF, but no more")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"cannot be started: [\s\S]*install git"):
        call("git", "version")


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
