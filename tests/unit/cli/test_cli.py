"""The command line: exit codes, help, interrupts, one JSON document, plans."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.cli.main import COMMANDS, main, parsed
from sparkforge.core import errors
from sparkforge.core.errors import StoreError
from sparkforge.sources.project import store_of
from tests.support import PATIENCE_S, ROOT, python

NAMES = [words.split() for rows in COMMANDS.values() for words in rows]


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command with --json; return its document."""
    assert main([*words, "--json"]) == code
    seen = capsys.readouterr()
    assert ("Traceback" in seen.err) == (code == 1)
    found = json.loads(seen.out)
    assert isinstance(found, dict)
    return found


def child(shell: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command, with ``"$0" -m sparkforge`` for sparkforge."""
    words = ["/bin/sh", "-c", shell, sys.executable]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_usage_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    for line in capsys.readouterr().out.splitlines():
        if "python3 build.py" in line:
            parsed(line.partition("#")[0].split()[2:])
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(more or f"\n│ {name} " in shown for name, *more in NAMES)
    assert main(["pins"]) == 2
    assert "record" in capsys.readouterr().out


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([*words, "--help"]) == 0
    assert f"Usage: build.py {' '.join(words)}" in capsys.readouterr().out


def test_a_command_imports_no_other_commands() -> None:
    code = 'import sys; from sparkforge.cli.main import main; main(["pins", "check"])'
    done = child(f"\"$0\" -c '{code}; print(*sys.modules)'")
    assert not {"sparkforge.cli.build", "sparkforge.runtime.engine", "docker", "numpy"} & set(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("words", "command", "options"),
    [
        (["--target", "cpu"], "build_target", {"target": "cpu", "until": "smoke"}),
        (["bench", "--target", "cpu"], "run", {"target": "cpu", "runs": 3}),
        (["dev", "--target", "cpu", "--", "a", "-b"], "run", {"arguments": ("a", "-b")}),
        (["serve", "--target", "cpu", "--", "--", "x"], "run", {"arguments": ("--", "x")}),
        (["--target", "cpu", "--force", "wheels", "--force", "smoke"], "build_target", {}),
    ],
)
def test_words_become_options(words: list[str], command: str, options: dict[str, object]) -> None:
    function, found = parsed(words)
    assert function.__name__ == command
    assert {name: getattr(found, name) for name in options} == options


def test_questions(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--version")
    assert main(["--version"]) == 0
    assert str(found["pins_sha256"]).startswith(capsys.readouterr().out.split()[-1])
    codes = document(capsys, "--exit-codes")["exit_codes"]
    assert codes == {str(code): meaning for code, meaning in errors.exit_codes()}


@pytest.mark.parametrize("words", [["pins", "check"], ["patches", "list", "vllm"]])
def test_json_is_one_document(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "error" not in document(capsys, *words)
    assert main(["dev", "--target", "none", "--", "echo", "--json"]) == 2
    assert capsys.readouterr().out == ""  # what is after -- is not ours


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ZeroDivisionError("/some/file"), 1),
        (PermissionError(errno.EACCES, "no access", "/some/file"), 11),
        (OSError(errno.ENOSPC, "full", "/some/file"), 11),
    ],
)
def test_a_bug_shows_its_traceback_and_an_error_of_the_system_none(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("sparkforge.pins.pins.load", fail)
    assert "/some/file" in str(document(capsys, "pins", "check", code=code)["error"])


def test_a_full_disk_behind_stdout_is_no_bug() -> None:
    for words in ("patches list", "patches list --json"):
        done = child(f'"$0" -m sparkforge {words} >/dev/full')
        assert done.returncode == StoreError.exit_code, done.stderr
        assert "Traceback" not in done.stderr


# -- interrupts --------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
from sparkforge.cli import main
from sparkforge.pins import pins
class Panic(BaseException):
    pass
def load(*args):
    if sys.argv[1] == "exec":  # where dataclasses are made: CPython remembers it
        exec("raise KeyboardInterrupt")
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise Panic if sys.argv[1] == "panic" else KeyboardInterrupt from None
pins.load = load
if sys.argv[1] == "held":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(main.main(["pins", "check"]))
"""


@pytest.mark.parametrize("how", ["exec", "panic", "held"])
def test_an_interrupt_exits_with_130(how: str) -> None:
    ended = python(INTERRUPTED, how)
    out, _ = ended.communicate()
    assert ended.returncode == 128 + signal.SIGINT, out
    assert "Traceback" not in out


# -- plans -------------------------------------------------------------------------------------


def plan_of(capsys: pytest.CaptureFixture[str], store: Path, *words: str) -> dict[str, Any]:
    """Return the document of a plan, of a build that has made nothing yet."""
    found = document(capsys, *words, "--engine", "none", "--dry-run", "--store", str(store))
    assert not store.exists()
    return found


def test_a_plan_sums_what_is_fetched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = plan_of(capsys, tmp_path / "s", "--target", "rtx", "--source", "git")
    house = next(step for step in found["plan"] if step["stage"] == "wheelhouse")
    assert house["download"] > 500 << 20  # PyTorch and CUDA's libraries
    made = ("wheels", "kernels", "packs")
    others = [step["download"] for step in found["plan"] if step["stage"] in made]
    assert found["fetches"]["known"] == house["download"] + sum(others) > house["download"]
    assert found["fetches"]["unknown"]


def test_a_plan_for_another_platform_says_what_is_not_made_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = plan_of(capsys, tmp_path / "s", "--target", "spark")
    assert found["until"] == found["plan"][-1]["stage"] == "packs"
    words = ["--target", "spark", "--engine", "none", "--store", str(tmp_path / "s")]
    assert main(words) == 2  # without the plan it is an error
    assert main([*words, "--dry-run", "--mirror", "vlm=/x"]) == 2  # a mistake is still one


def test_the_store_is_named_by_option_variable_or_cache_folder(
    isolated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_of(None).root == isolated / ".cache" / "sparkforge"
    for name, place in (("XDG_CACHE_HOME", "sparkforge"), ("SPARKFORGE_STORE", "")):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert store_of(None).root == tmp_path / name / place
    assert store_of(str(tmp_path / "option")).root == tmp_path / "option"
