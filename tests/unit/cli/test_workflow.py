"""The workflow that records git sources: its commands exist, and it may write only on request."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sparkforge.cli import main
from sparkforge.pins import pins
from tests.support import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/git-sources.yml").read_text())
JOBS: dict[str, Any] = WORKFLOW["jobs"]
INPUTS = WORKFLOW[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads "on" as true


def commands(target: str) -> Iterator[list[str]]:
    """Give the words behind each ``build.py`` that the workflow runs for a target."""
    for job in JOBS.values():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                if "build.py" in line:
                    words = shlex.split(line.replace("$TARGET", target))
                    assert words[:2] == ["python3", "build.py"]
                    yield words[2:]


@pytest.mark.parametrize("target", INPUTS["target"]["options"])
def test_the_commands_are_ones_that_build_py_takes(target: str) -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    found = [main._parser().parse_args(words) for words in commands(target)]
    assert [one.command for one in found] == ["build", "pins", "build", "pins"]
    assert {one.target for one in found if one.command == "build"} == {target}
    assert [one.source for one in found if hasattr(one, "source")] == ["git"] * 3
    wheels = loaded.target(target).wheels
    every = {name for wheel, plan in wheels.items() for name in (wheel, *plan.carries)}
    assert set(found[-1].upstream) == every


def test_only_the_job_that_is_asked_for_may_write_and_it_runs_nothing_of_ours() -> None:
    assert WORKFLOW["permissions"] == {}
    assert JOBS["record"]["permissions"] == {"contents": "read"}
    writes = JOBS["propose"]
    assert "inputs.pull_request" in writes["if"]
    assert INPUTS["pull_request"]["default"] is False
    assert "build.py" not in "".join(step.get("run", "") for step in writes["steps"])


def test_no_action_is_used_unless_by_its_full_sha() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", one) for one in used)


def test_what_people_type_reaches_a_shell_in_variables_alone() -> None:
    for job in JOBS.values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), step["name"]
