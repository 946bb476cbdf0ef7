"""Commands in pages, workflows, forms and hooks are ones that build.py has."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkforge.cli import main
from sparkforge.pins import pins
from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"
FORMS = sorted(
    path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)
_BLOCK = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"\bpython3 build\.py\b(.*)")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind ``python3 build.py``, without those behind ``--``."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := _COMMAND.search(line):
            words = found[1].replace("2>&1", "").replace("$TARGET", "spark")
            lexer = shlex.shlex(words, posix=True, punctuation_chars="|&;<>()")
            lexer.whitespace_split = True
            yield list(takewhile(lambda word: word[0] not in "|&;<>()" and word != "--", lexer))


def steps(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each step of a workflow, after its job."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            yield job, step


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_parse(page: Path) -> None:
    for words in commands("".join(_BLOCK.findall(page.read_text()))):
        main.parsed(words)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_our_commands_alone(path: Path) -> None:
    known = pins.load(ROOT / "pins.yaml").targets
    assert yaml.safe_load(path.read_text())["permissions"] == {}
    for job, step in steps(path):
        assert "uses" not in step  # no action has to be trusted
        assert "${{" not in step["run"]  # what people type reaches a shell in variables
        subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
        if "write" in job["permissions"].values() and "build.py" in step["run"]:
            assert [words[:2] for words in commands(step["run"])] == [["watch", "--propose"]]
            assert "refs/heads/main" in job["if"], "a job that may write runs main's code alone"
        for words in commands(step["run"]):
            _, options = main.parsed(words)
            assert getattr(options, "target", None) in (None, *known)


@pytest.mark.parametrize("registry", ["registry.example.org", ""])
def test_a_token_goes_to_the_named_registry_alone(registry: str, tmp_path: Path) -> None:
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$1 $2"\n')
    (tmp_path / "docker").chmod(0o755)
    lines = [line for _, step in steps(RELEASE) for line in step["run"].splitlines()]
    logins = [line for line in lines if "docker login" in line]
    assert len(logins) == 3
    names = ("REGISTRY", "NAME", "TOKEN", "GH_TOKEN", "GITHUB_ACTOR")
    env = {**dict.fromkeys(names, "x"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"REGISTRY": registry, "NAME": f"{registry}/me/fork"}
    for line in logins:
        done = subprocess.run(
            ["bash", "-euc", line], env=env, capture_output=True, text=True, check=False
        )
        # without a name docker would send it to Docker's own
        assert done.stdout == (f"login {registry}\n" if registry else ""), line
        assert (done.returncode == 0) is bool(registry)


def test_what_has_to_run_runs() -> None:
    nightly = [step for _, step in steps(ROOT / ".github/workflows/nightly.yml")]
    found = {words[0] for step in nightly for words in commands(step["run"])}
    assert {"watch", "build", "verify"} <= found
    assert "run: .ci/run\n" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_forms_name_what_there_is() -> None:
    loaded = pins.load(ROOT / "pins.yaml")
    options: dict[str, list[str]] = {}
    for path in FORMS:
        text = path.read_text()
        report = r"report --all" if path.stem == "first-run" else r"doctor --target \w+ --report"
        assert re.search(rf"build\.py {report}", text)
        assert all((ROOT / page).is_file() for page in re.findall(r"docs/[\w-]+\.md", text))
        for part in yaml.safe_load(text)["body"]:
            options[part.get("id")] = part.get("attributes", {}).get("options", [])
    assert options["upstream"] == list(loaded.upstreams)
    assert set(options["target"]) == {*loaded.targets, "none"}


def test_hooks_are_local_and_their_commands_are_there() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    lock = (ROOT / "requirements/dev.txt").read_text()
    for hook in repo["hooks"]:
        words = shlex.split(hook["entry"])
        if words[1] == "build.py":
            main.parsed(words[2:])
        else:
            assert words[:2] == [".venv-dev/bin/python", "-m"]
            assert re.search(rf"^{words[2]}==", lock, re.MULTILINE)
