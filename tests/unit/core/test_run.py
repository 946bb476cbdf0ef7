"""Child processes: what they say, and that nothing of them stays."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import CommandError, MachineError, SparkforgeError
from sparkforge.core.log import log
from sparkforge.core.run import background, call
from tests.support import alive, wait_for

# a child that starts a child of its own, writes both ids and stays
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(60)
"""


def family(note: Path) -> list[int]:
    wait_for(note.exists)
    return [int(word) for word in note.read_text().split()]


def test_output_and_exit_code_are_returned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("sh", "-c", "echo out; echo err >&2; exit 3", check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(log, "verbose", True)
    call("echo", "one two")
    assert "echo 'one two'" in capsys.readouterr().out


def test_streamed_output_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    script = r"printf '1%%\r2%%\rone\n'; echo two >&2; printf 'three\r\nfour'"
    result = call("sh", "-c", script, stream=True)
    assert capsys.readouterr().out == "  | one\n  | two\n  | three\n  | four\n"
    assert result.stdout == b"one\ntwo\nthree\r\nfour"


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("no-such-program x", MachineError, "PATH"),
        ("sh -c 'seq 100; echo last words >&2; exit 7'", CommandError, "62\n.*last words"),
    ],
)
def test_a_failure_is_an_error_with_the_output(
    script: str, kind: type[SparkforgeError], text: str
) -> None:
    with pytest.raises(kind, match=f"(?s){text}"):
        call(*shlex.split(script), env={"LC_ALL": "C"})


def test_timeout_ends_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, communicate = tmp_path / "note", subprocess.Popen.communicate

    def late(*words: Any, **more: Any) -> Any:
        wait_for(note.exists)  # on a busy machine the second may be over before Python has started
        return communicate(*words, **more)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    with pytest.raises(CommandError, match="did not finish within 1 s"):
        call(sys.executable, "-c", FAMILY, note, timeout=1)
    pids = family(note)
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_error_ends_server_and_children(tmp_path: Path, error: BaseException) -> None:
    note = tmp_path / "note"
    with (
        pytest.raises(type(error)),
        background(sys.executable, "-c", FAMILY, note, output=tmp_path / "log"),
    ):
        pids = family(note)
        assert all(alive(pid) for pid in pids)
        raise error
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_stubborn_server_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = tmp_path / "log"
    with background(sys.executable, "-c", STUBBORN, output=sink, grace_s=0.2) as child:
        wait_for(lambda: sink.read_bytes() == b"1\n")
    assert child.returncode == -signal.SIGKILL
    assert "did not stop within 0 s: killed" in capsys.readouterr().out
