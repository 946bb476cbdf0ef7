"""What is printed where: terminals, pipes, CI, and a reader that goes away."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge.core import errors
from sparkforge.core.log import Log
from tests.support import ROOT

SHOW = """
from sparkforge.core.log import log
log.configure(to_stderr=False, verbose=True)
with log.step("work"):
    log.warning("careful")
    log.detail("in detail")
log.error("wrong")
"""


def in_pipe(code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **env},
    )


def test_a_pipe_has_plain_lines_and_with_json_stdout_has_the_document_alone() -> None:
    done = in_pipe(SHOW)
    assert b"\033" not in done.stdout + done.stderr
    assert "✓ work" in done.stdout.decode()
    assert done.stderr == b"error: wrong\n"
    assert b"? work" in in_pipe(SHOW, PYTHONIOENCODING="ascii").stdout
    code = SHOW.replace("to_stderr=False", "to_stderr=True") + "log.document({'b': 1, 'a': 'ü'})\n"
    done = in_pipe(code)
    assert done.stdout == b'{\n  "a": "\\u00fc",\n  "b": 1\n}\n'
    assert "✓ work" in done.stderr.decode()


def test_closed_pipe_does_not_end_the_build(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from sparkforge.core.log import log
for i in range(20000):
    log.info(f"line {{i}}")
Path({str(tmp_path / "done")!r}).write_text("yes")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"  line 0\n"
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0
    assert (tmp_path / "done").read_text() == "yes"


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.mark.parametrize("name", ["::x", "a\r\n ::x", "##[x]"])
def test_text_cannot_forge_log_lines(
    log: Log, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    log.verbose = True
    for say in (log.info, log.detail, log.heading, log.warning, log.error, log.raw):
        say(name)
    log.table([(name, "cell")])
    log.failure(errors.SeriesError(f"{name}: bad", name))
    said = "".join(capsys.readouterr())
    assert not re.search(r"^\s*::|##\[", said, re.MULTILINE)


def test_control_characters_are_shown_as_text(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2Jb\rc\x9bd\u202ee\x1b]0;title\x07"
    for say in (log.info, log.warning, log.heading, log.error, log.raw):
        say(hostile)
    log.table([(hostile, "x")])
    with log.step(hostile):
        log.progress(hostile)
    for shown in capsys.readouterr():
        assert r"a\x1b[2Jb\rc\x9bd\u202ee\x1b]0;title\x07" in shown
        assert not set(shown) & set("\x1b\r\x9b\u202e\x07")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:hush@host/x", "https://***@host/x"),
        ("see ssh://git@host/a and http://a:b@c", "see ssh://***@host/a and http://***@c"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://me:hu@sh@host/x", "https://***@host/x"),
        ('{"a":"http://host:80","mail":"me@host"}', '{"a":"http://host:80","mail":"me@host"}'),
        (
            "--key 'pkcs11:token=a?module-path=/p.so&pin-value=12%2634&x=y'",
            "--key 'pkcs11:token=a?module-path=/p.so&pin-value=***&x=y'",
        ),
    ],
)
def test_secrets_are_masked(
    log: Log, capsys: pytest.CaptureFixture[str], address: str, shown: str
) -> None:
    log.info(address)
    log.error(address)
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == (f"  {shown}\n", f"error: {shown}\n")
    log.configure(to_stderr=True, verbose=False)
    log.document({address: [address]})
    assert json.loads(capsys.readouterr().out) == {shown: [shown]}
