"""scripts/test.py: steps that run two at a time."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE_S, load_script


def meet(here: Path, there: Path) -> tuple[str, ...]:
    """Return a command that says three lines and ends well only if another runs beside it."""
    wait = f"timeout {PATIENCE_S:.0f} sh -c 'until [ -e {there} ]; do sleep 0.01; done'"
    return "sh", "-c", f"echo one; touch {here}; {wait} || exit 1; echo two >&2; echo three"


def test_lanes_run_two_at_a_time_and_what_a_step_prints_stays_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = load_script("test").Steps(dict(os.environ))
    steps.images["NAME"] = "image"
    a, b = tmp_path / "a", tmp_path / "b"
    more: list[bool] = []
    steps.at_once(
        lambda: steps.run("first", *meet(a, b)),
        lambda: steps.run("second", *meet(b, a)),
        lambda: more.append(steps.run("third", "sh", "-c", 'exit "${NAME:-3}"')),
    )
    steps.run("alone", "sh", "-c", 'echo "$NAME"', images=True)
    out = capfd.readouterr().out
    assert "\n== first\none\ntwo\nthree\n" in out
    assert "\n== second\none\ntwo\nthree\n" in out
    assert out.endswith("\n== alone\nimage\n")
    assert more == [False]
    assert {name: ok for name, ok, _ in steps.rows} == {
        "first": True,
        "second": True,
        "third": False,
        "alone": True,
    }
    assert steps.finish() == 1


def test_what_goes_wrong_in_a_lane_is_raised_after_the_others(tmp_path: Path) -> None:
    steps = load_script("test").Steps(dict(os.environ))

    def broken() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        steps.at_once(broken, lambda: steps.run("other", "touch", tmp_path / "done"))
    assert (tmp_path / "done").exists()


FAST = {"ruff", "mypy", "hadolint", "pins check", "unit and integration"}
PATCHES = {"patch lint and exact application", "patches"}


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        (["--fast"], FAST),
        ([], FAST | PATCHES | {"whole build"}),
        (["--with-engine"], FAST | PATCHES | {"whole build, with image"}),
    ],
)
def test_each_option_has_its_steps_and_no_two_share_a_folder(
    options: list[str], ran: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("test")
    commands: dict[str, tuple[str | Path, ...]] = {}

    def run(steps: Any, name: str, *command: str | Path, images: bool = False) -> bool:
        commands[name] = command
        steps.rows.append((name, True, 0.0))
        return True

    def bases(steps: Any, stack: ExitStack) -> None:
        steps.images["SPARKFORGE_TEST_BASE"] = "base"

    monkeypatch.setattr(script.Steps, "run", run)
    monkeypatch.setattr(script, "bases", bases)
    monkeypatch.setattr(script, "ensure_environment", lambda *_: Path("bin/python"))
    monkeypatch.setattr("sys.argv", ["test.py", *options])
    assert script.main() == 0
    assert ran <= commands.keys()
    assert {name for name in commands if name.startswith(("whole", "patch"))} == ran - FAST
    folders = [words[words.index("--basetemp") + 1] for words in commands.values() if "-n" in words]
    assert len(folders) == len(set(folders)) == (1 if "--fast" in options else 3)
