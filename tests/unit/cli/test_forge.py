"""Workflows, forms and hooks: their fields, their commands, and what they may do."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from sparkforge.cli import main
from sparkforge.pins import pins
from tests.support import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
NIGHTLY = ROOT / ".github/workflows/nightly.yml"
FORMS = sorted(
    path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)


class Strict(BaseModel):
    """What a forge ignores or refuses is an error here: a field that is unknown or missing."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Step(Strict):
    name: str
    id: str | None = None
    if_: str | None = Field(default=None, alias="if")
    env: dict[str, str] = {}
    run: str


class Job(Strict):
    runs_on: Literal["ubuntu-24.04"] = Field(alias="runs-on")
    timeout_minutes: int = Field(alias="timeout-minutes", ge=1, le=120)
    permissions: dict[Literal["contents", "issues", "pull-requests"], Literal["read", "write"]]
    needs: str | None = None
    if_: str | None = Field(default=None, alias="if")
    container: dict[Literal["image", "options"], str] = {}
    outputs: dict[str, str] = {}
    strategy: dict[str, Any] = {}
    env: dict[str, str] = {}
    steps: list[Step] = Field(min_length=1)


class Workflow(Strict):
    name: str
    on: dict[str, Any]
    permissions: dict[str, str] = Field(max_length=0)
    concurrency: dict[str, Any] = {}
    jobs: dict[str, Job] = Field(min_length=1)


class Attributes(Strict):
    label: str | None = None
    description: str | None = None
    value: str | None = None
    render: str | None = None
    options: list[str] = []


class Part(Strict):
    type: Literal["markdown", "textarea", "input", "dropdown"]
    id: str | None = None
    attributes: Attributes
    validations: dict[Literal["required"], bool] = {}


class Form(Strict):
    name: str
    description: str
    labels: list[str]
    body: list[Part] = Field(min_length=1)


def read(path: Path) -> Any:
    """Return a YAML file; in YAML 1.1, a key ``on`` is read as true."""
    found = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in found.items()}


def workflow(path: Path) -> Workflow:
    return Workflow.model_validate(read(path))


def scripts(found: Workflow) -> Iterator[tuple[Job, Step]]:
    for job in found.jobs.values():
        for step in job.steps:
            yield job, step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_fields_that_a_forge_knows(path: Path) -> None:
    found = workflow(path)  # steps with `uses` would be refused: no action has to be trusted
    for job, step in scripts(found):
        assert "${{" not in step.run, step.name  # what people type reaches a shell in variables
        subprocess.run(["bash", "-n"], input=step.run, text=True, check=True)
        if "write" in job.permissions.values():
            assert "build.py" not in step.run, "a job that may write runs nothing of the checkout"
    for job in found.jobs.values():
        named = set(re.findall(r"steps\.([\w-]+)\.", " ".join(job.outputs.values())))
        assert named <= {step.id for step in job.steps}
        assert job.needs is None or job.needs in found.jobs


def commands(found: Workflow) -> Iterator[list[str]]:
    """Yield the words of each ``build.py`` of a workflow, with each target of its matrix."""
    for job, step in scripts(found):
        targets = job.strategy.get("matrix", {}).get("target", ["spark"])
        for line in re.findall(r"python3 build\.py ([^|>]*?)(?: \|\||>|$)", step.run, re.MULTILINE):
            for target in targets:
                yield shlex.split(line.replace("$TARGET", target))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_commands_of_a_workflow_are_taken(path: Path) -> None:
    known = pins.load(ROOT / "pins.yaml").targets
    for words in commands(workflow(path)):
        _, options = main.parsed(words)
        assert getattr(options, "target", None) in (None, *known)


def test_what_has_to_run_runs() -> None:
    said = {path.stem: path.read_text() for path in WORKFLOWS}
    assert "run: .ci/run\n" in said["ci"]
    nightly = [words[0] for words in commands(workflow(NIGHTLY))]
    assert {"watch", "build", "verify"} <= set(nightly)
    assert "schedule" in read(NIGHTLY)["on"]
    assert "python3 scripts/test.py --stock" in [step.run for _, step in scripts(workflow(NIGHTLY))]


def test_the_title_of_an_issue_is_found_again(tmp_path: Path) -> None:
    """A forge drops a space at its end, and the next night would open another issue."""
    (step,) = (one for _, one in scripts(workflow(NIGHTLY)) if one.id == "watch")
    (code,) = re.findall(r"python3 -c '([^']*)'", step.run)
    found = [("a", "1", "2"), ("b", "1", "1"), ("c", "1", "3")]
    watch = [{"upstream": name, "pinned": old, "newest": new} for name, old, new in found]
    (tmp_path / "news.json").write_text(json.dumps({"watch": watch}))
    said = subprocess.run(["python3", "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert said.stdout == b"a 2 c 3\n"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_the_fields_that_a_forge_knows(path: Path) -> None:
    form = Form.model_validate(read(path))
    asked = [part for part in form.body if part.type != "markdown"]
    assert len({part.id for part in asked}) == len(asked)
    assert all(part.id and part.attributes.label for part in asked)
    assert all(bool(part.attributes.options) == (part.type == "dropdown") for part in asked)
    text = path.read_text()
    assert re.search(r"build\.py doctor --target \w+ --report", text)
    for page in re.findall(r"docs/[\w-]+\.md", text):
        assert (ROOT / page).is_file()


def test_forms_name_the_targets_and_upstreams_that_there_are() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    options: Mapping[str, list[str]] = {
        part.id: part.attributes.options
        for path in FORMS
        for part in Form.model_validate(read(path)).body
        if part.id
    }
    assert options["upstream"] == list(loaded.upstreams)
    assert set(options["target"]) == {*loaded.targets, "none"}


def test_hooks_are_local_and_their_commands_are_there() -> None:
    (repo,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        words = shlex.split(hook["entry"])
        if words[1] == "build.py":
            main.parsed(words[2:])
        else:
            assert words[:2] == [".venv-dev/bin/python", "-m"]
            lock = (ROOT / "requirements/dev.txt").read_text()
            assert re.search(rf"^{words[2]}==", lock, re.MULTILINE)
