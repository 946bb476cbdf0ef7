"""The command line: exit codes, near misses, and one JSON document."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sparkforge import __version__
from sparkforge.cli import overview
from sparkforge.cli.main import _parser, main
from sparkforge.core import errors
from sparkforge.core.errors import StoreError
from sparkforge.core.log import Log, human_bytes, log
from sparkforge.sources.project import store_of
from tests.support import PATIENCE_S, ROOT, python


def told(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Run main(); return what it said on stderr."""
    assert main(words) == code
    seen = capsys.readouterr()
    assert "Traceback" not in seen.out + seen.err
    return seen.err


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["bild", "--target", "cpu"], "invalid choice: 'bild'"),
        (["build", "--target", "cpu", "--colour"], "unrecognized arguments: --colour"),
        (["--target", "cpu", "--engine", "none", "--builder", "x"], "need a container engine"),
        (["--target", "cpu", "--dry-run", "--ca-bundle", "no/such"], "no/such: no such file"),
        (["serve", "--chat", "--model", "x"], "--model: not allowed with argument --chat"),
        (
            ["serve", "--target", "rtx", "--engine", "none", "--chat"],
            "--chat: target rtx serves a",
        ),
        # before anything is built
        (["serve", "--target", "cpu", "--model", "no/such"], "--model no/such: no such folder"),
        (["serve", "--target", "cpu", "--model", "/"], "--model /: has no config.json"),
        (["--target", "cpu", "--until", "never"], "invalid choice: 'never'"),
        (["--target", "cpu", "--engine", "podman"], "invalid choice: 'podman'"),
        (["--target", "cpu", "--port", "70000"], "'70000' is not a port"),
        (["--target", "cpu", "--port", "http"], "'http' is not a port: use 0 to 65535"),
        (["build"], "required: --target"),
        (["pins"], "required: ACTION"),
        (["patches", "apply", "vllm"], "required: folder"),
        (["--target", "cpuu"], "'cpuu': no such target"),
        (["patches", "list", "vlm"], "'vlm': no such upstream"),
        (["bench", "quality", "--target", "cpu", "--layers", "qv"], "qv"),
        (["bench", "--target", "cpu", "--quality", "--layers", "qv"], "qv"),
        (["bench"], "required: ACTION"),
        (
            ["bench", "quality", "--target", "cpu", "--max-kl", "x"],
            "'x' is not a number of at least 0",
        ),
        (
            ["bench", "quality", "--target", "cpu", "--tokens", "0"],
            "'0' is not a whole number from 1",
        ),
        (["--target", "cpu", "--", "--mxfp4-layers", "o"], "build takes no arguments after --"),
        (["explain", "--target", "cpu", "--off"], "unrecognized arguments: --off"),
        (["--target", "cpu", "--until", "wheels", "--mirror", "vllm"], "not UPSTREAM=URL-or-path"),
        (["--target", "cpu", "--until", "wheels", "--mirror", "vlm=/x"], "'vlm': no such upstream"),
    ],
)
def test_words_that_make_no_sense_are_refused_with_a_way_out(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    fragment: str,
) -> None:
    monkeypatch.setenv("SPARKFORGE_STORE", str(tmp_path / "store"))
    err = told(capsys, 2, *words)
    assert err.startswith("error: ")
    assert fragment in err
    assert "hint: " in err
    assert not (tmp_path / "store").exists()


def test_an_unknown_target_suggests_the_near_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    err = told(capsys, 2, "--target", "sprak", "--until", "wheels", "--store", str(tmp_path))
    assert "did you mean spark?" in err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["buidl", "--target", "cpu"], "build"),
        (["--target", "cpu", "--dryrun"], "--dry-run"),
        (["serve", "--target", "cpu", "--prot=80"], "--port"),
        (["--target", "cpu", "--until", "wheel"], "wheels"),
        (["patches", "lst"], "list"),
        (["patches", "list", "--jsn"], "--json"),
    ],
)
def test_a_misspelt_word_suggests_the_near_one(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    assert f"did you mean {meant}? " in told(capsys, 2, *words)


def test_what_is_near_to_nothing_suggests_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in told(capsys, 2, "xyzzy")
    assert "did you mean" not in told(capsys, 2, "--target", "cpu", "--xyzzy")


def test_no_words_at_all_get_three_examples(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, 2)
    assert shown.count("  python3 build.py ") == 3
    assert len(shown.splitlines()) < 10


def test_the_examples_are_taken() -> None:
    for words, _ in overview._EXAMPLES:
        given = words.split() if words[0] != "-" else ["build", *words.split()]
        assert _parser().parse_args(given).command == given[0]


def test_version_names_releases_and_pins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert f"sparkforge {__version__}" in shown
    assert main(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pins_sha256"].startswith(shown.split()[-1])
    assert all(release in shown for release in found["releases"].values())


def test_pins_that_are_not_there_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    err = told(capsys, 3, "pins", "check", "--pins", str(tmp_path / "pins.yaml"))
    assert "no such file" in err


def test_every_exit_code_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--exit-codes"]) == 0
    out = capsys.readouterr().out
    assert main(["--exit-codes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["exit_codes"]
    assert len(set(found.values())) == len(found)
    for code, meaning in errors.exit_codes():
        assert f"  {code:3}  {meaning}" in out
        assert found[str(code)] == meaning


def test_a_command_imports_no_other_commands() -> None:
    code = """
import sys
from sparkforge.cli.main import _parsed
_parsed(["clean", "--all"])
print(*(name for name in sys.modules if name.startswith("sparkforge.cli.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert names == {"main", "parser", "overview", "clean"}


@pytest.mark.parametrize(
    ("words", "homes"),
    [
        (
            ["explain", "--target", "cpu", "--port", "5"],
            "build, smoke, serve, bench run and bench quality",
        ),
        (["explain", "--target", "cpu", "--ready-timeout=9"], "build, smoke, serve, bench run and"),
        (
            ["bench", "quality", "--target", "cpu", "--jobs", "3"],
            "build, packs, verify and dev",
        ),
        (["dev", "--target", "cpu", "--chat"], "--chat belongs to serve"),
        (["clean", "--target", "cpu"], "and other commands"),
        (["patches", "list", "--store", "x"], "--store belongs to doctor, build, "),
        (["roofline", "--target", "spark", "--check"], "belongs to patches export and docs"),
        (["roofline", "--target", "spark", "--docs"], "use build.py docs"),
    ],
)
def test_an_option_of_another_command_is_refused_with_its_place(
    capsys: pytest.CaptureFixture[str], words: list[str], homes: str
) -> None:
    err = told(capsys, 2, *words)
    assert f"build.py {' '.join(words[: 1 + (words[0] in ('bench', 'patches'))])} has no" in err
    assert homes in err


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "cpu", "--until", "wheels", "--port", "1"],
        ["--target", "rtx", "--dry-run", "--ready-timeout", "9"],  # it has no smoke test
    ],
)
def test_options_of_a_server_need_one(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert "--port and --ready-timeout are for the smoke test" in told(capsys, 2, *words)


@pytest.mark.parametrize(
    ("words", "as_json"),
    [
        (["pins", "check", "--pins", "no/such", "--json"], True),
        (["patches", "list", "vlm", "--json"], True),
        (["pins", "chek", "--json"], True),  # nothing is parsed
        (["patches", "list", "vlm"], False),
        (["dev", "--target", "none", "--", "echo", "--json"], False),
    ],
)
def test_the_output_is_json_where_the_option_says_so(
    capsys: pytest.CaptureFixture[str], words: list[str], as_json: bool
) -> None:
    assert main(words) in (2, 3)
    out = capsys.readouterr().out
    assert (bool(out) and "error" in json.loads(out)) == as_json


def commands() -> set[str]:
    """Every command but those behind an option."""
    actions = _parser()._actions
    names = {name for one in actions if one.choices for name in one.choices}
    return names - set(overview.QUESTIONS.values())


def test_help_lists_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    grouped = [name for names in overview.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(commands())
    assert all(f"\n  {name} " in out for name in grouped)
    assert max(map(len, out.splitlines())) < 100


@pytest.mark.parametrize("command", ["build", "explain", "smoke", "serve", "clean"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--store" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["pins", "check"], ["patches", "list"], ["patches", "list", "vllm"]]
)
def test_json_is_one_document(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main([*words, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_json_is_one_document_after_a_failure_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "cup", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 2
    assert "did you mean cpu?" in error["remedy"]


@pytest.mark.parametrize("place", ["taken", "/dev/null"])
def test_there_is_nothing_to_clean_where_no_store_can_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "taken").write_text("")
    assert main(["clean", "--store", str(tmp_path / place / "store")]) == 0
    assert "freed 0 B" in capsys.readouterr().out


def test_files_that_the_system_refuses_are_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("sparkforge.pins.pins.load", refused)
    assert main(["pins", "check", "--json"]) == 11
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err
    assert json.loads(seen.out)["error"]["what"] == "/some/file: Permission denied"


@pytest.mark.parametrize(
    ("stdout", "code"), [(">/dev/full", 11), (">&-", 0)], ids=["full", "closed"]
)
def test_a_stdout_that_takes_nothing_is_no_bug(stdout: str, code: int) -> None:
    for words in ("patches list", "patches list --json"):
        done = subprocess.run(
            ["/bin/sh", "-c", f'"$0" -m sparkforge {words} {stdout}', sys.executable],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert ("standard output: No space left" in done.stderr) == (code == 11)


def test_a_plan_for_the_real_pins_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--target", "cpu", "--until", "wheels", "--dry-run", "--store", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [step["label"] for step in plan][-1] == "wheel vllm"
    assert list(tmp_path.iterdir()) == []


def test_a_plan_sums_what_is_fetched_over_all_stages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        *("--target", "rtx", "--engine", "none", "--dry-run", "--store", str(tmp_path / "s")),
        *("--source", "git"),
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    house = next(step for step in found["plan"] if step["stage"] == "wheelhouse")
    assert house["download"] > 500 << 20  # PyTorch and CUDA's libraries
    assert not house["unknown"]
    made = ("wheels", "kernels", "packs")
    others = [step["download"] for step in found["plan"] if step["stage"] in made]
    assert found["fetches"]["known"] == house["download"] + sum(others) > house["download"]
    assert any(words.startswith("vllm by git") for words in found["fetches"]["unknown"])
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"to fetch: {human_bytes(found['fetches']['known'])}, vllm by git" in shown
    assert shown.count("never built for this target") == 1
    assert " free for the store in " in shown


def test_a_file_that_two_items_need_is_counted_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--target", "cpu", "--engine", "none", "--dry-run", "--store", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 0
    plan = {step["label"]: step for step in json.loads(capsys.readouterr().out)["plan"]}
    if "wheel vllm (unpatched)" in plan:  # not on another platform than the target's
        assert plan["wheel vllm"]["download"] > 0
        assert plan["wheel vllm (unpatched)"]["download"] == 0


def test_a_forced_smoke_test_keeps_the_release_that_it_compares_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--target", "cpu", "--engine", "none", "--dry-run", "--store", str(tmp_path / "s")]
    assert main([*words, "--force", "smoke", "--json"]) == 0
    plan = {step["label"]: step for step in json.loads(capsys.readouterr().out)["plan"]}
    again = {label for label, step in plan.items() if step["state"] == "to make again"}
    if "environment (unpatched)" in plan:  # not on another platform than the target's
        assert again == {"smoke"}


def test_another_platforms_target_gets_a_plan_with_what_is_not_made_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    words = ["--target", "spark", "--engine", "none", "--dry-run", "--store", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["until"] == found["plan"][-1]["stage"] == "packs"
    assert "spark is for linux/arm64" in found["note"]
    # without the plan it is an error, as before; what serves is served there
    for command in ((), ("serve",)):
        err = told(capsys, 2, *command, *words[:4], *words[-2:])
        assert "build on linux/arm64; or an image here, with a container engine; or stop" in err
    # a mistake is still one
    assert main([*words, "--mirror", "vlm=/x"]) == 2


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("unix:///nowhere/docker.sock", "No such file or directory"),
        ("tcp://127.0.0.1:9", "Connection refused"),
    ],
)
def test_such_a_plan_says_in_its_last_line_that_no_engine_answers(
    tmp_path: Path, address: str, reason: str
) -> None:
    elsewhere = "rtx" if platform.machine() == "aarch64" else "spark"
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("--target", elsewhere, "--dry-run", "--store", str(tmp_path / "s"))
    out = subprocess.run(
        [sys.executable, "-m", "sparkforge", *words],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "DOCKER_HOST": address},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert out[0].startswith(f"plan for {elsewhere} on ")
    assert f"no container engine answers at {address}: {reason}; build on " in out[-1]


def test_a_bug_shows_its_traceback_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("sparkforge.pins.pins.load", bug)
    assert main(["pins", "check", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "a bug in sparkforge" in err
    assert "ZeroDivisionError" in err
    assert json.loads(out)["error"]["exit_code"] == 1


def test_a_failure_after_the_document_gives_no_second_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARKFORGE_STORE", str(tmp_path))

    def late(document: object) -> None:
        Log.json(log, document)
        raise StoreError("the disk is full")

    monkeypatch.setattr(log, "json", late)
    assert main(["clean", "--json"]) == StoreError.exit_code
    monkeypatch.undo()
    assert json.loads(capsys.readouterr().out) == {"freed_bytes": 0}


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "soon"])
def test_a_server_is_waited_for_as_long_as_a_number_says(
    capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    assert main(["--target", "cpu", "--dry-run", "--ready-timeout", seconds]) == 2
    assert f"'{seconds}' is not a number" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparkforge.pins.pins.load", interrupted)
    assert "the next run continues" in told(capsys, 130, "pins", "check")


IN_A_DATACLASS = """
import os, signal, sys
from sparkforge.cli import main
from sparkforge.pins import pins
def interrupted(*args):
    if sys.argv[1] == "import":  # where dataclasses are made: CPython remembers it
        exec("raise KeyboardInterrupt")
    raise KeyboardInterrupt
pins.load = interrupted
sys.exit(main.main(["pins", "check"]))
"""
PANIC = """
import os, signal, sys
from sparkforge.cli import main
from sparkforge.pins import pins
class PanicException(BaseException):
    pass
def load(*args):
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        raise PanicException("failed to import `datetime` C API") from None
pins.load = load
sys.exit(main.main(["pins", "check"]))
"""
HELD_BACK = """
import os, signal, sys
from sparkforge.cli import main
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
os.kill(os.getpid(), signal.SIGINT)
sys.exit(main.main(["pins", "check"]))
"""


@pytest.mark.parametrize(
    "code",
    [(IN_A_DATACLASS, "import"), (IN_A_DATACLASS, "run"), (PANIC, ""), (HELD_BACK, "")],
)
def test_an_interrupt_at_any_moment_exits_with_130(code: tuple[str, str]) -> None:
    child = python(*code)
    out, _ = child.communicate()
    assert child.returncode == 130, out
    assert "the next run continues" in out
    assert "Traceback" not in out


def test_the_store_is_named_by_option_variable_or_cache_folder(
    isolated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(named: str | None = None) -> Path:
        return store_of(named).root

    assert place() == isolated / ".cache" / "sparkforge"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert place() == tmp_path / "xdg" / "sparkforge"
    monkeypatch.setenv("SPARKFORGE_STORE", str(tmp_path / "variable"))
    assert place() == tmp_path / "variable"
    assert place(str(tmp_path / "option")) == tmp_path / "option"
