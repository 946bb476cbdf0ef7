"""The files that serve a release, who signs, and what is no release."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkforge.build.context import release_name
from sparkforge.core.errors import CheckError, MachineError, UsageError
from sparkforge.pins import pins
from sparkforge.release import command, files
from sparkforge.runtime import engine
from tests.support import ROOT

COMPOSE = (ROOT / "docker-compose.yml").read_text()
NAME = f"registry.example.org/me/fork@sha256:{'1' * 64}"
IMAGES = dict.fromkeys(("cpu", "spark", "rtx", "router"), NAME)
WORKFLOW = "me/fork/.github/workflows/release.yml@refs/tags/v1"
JOB = {
    "ACTIONS_ID_TOKEN_REQUEST_URL": "x",
    "GITHUB_SERVER_URL": "https://forge.example.org",
    "GITHUB_WORKFLOW_REF": WORKFLOW,
}


@pytest.fixture(scope="module")
def served() -> dict[str, str]:
    return files.files(pins.load(ROOT / "pins.yaml"), COMPOSE, "1-spark.1", IMAGES)


def test_compose_serves_a_spark_by_digest_and_builds_nothing(served: dict[str, str]) -> None:
    found = yaml.safe_load(served[files.COMPOSE])
    before = yaml.safe_load(COMPOSE)["services"]
    assert [name for name, one in found["services"].items() if "profiles" not in one] == ["spark"]
    for name, service in found["services"].items():
        changed = {key for key in before[name] if service.get(key) != before[name][key]}
        assert changed <= {"image", "pull_policy", "profiles"}
        assert (service["image"], service["pull_policy"]) == (NAME, "missing")
    assert found["volumes"]["models"] == {"name": "sparkforge-models"}
    assert "build" not in served[files.COMPOSE]


def test_the_example_has_every_variable_that_compose_reads(served: dict[str, str]) -> None:
    listed = set(re.findall(r"(?m)^#(\w+)=$", served[files.VARIABLES]))
    text = served[files.COMPOSE]
    read = {*re.findall(r"\$\{(\w+)", text), *re.findall(r"(?m)^ +([A-Z_]+):$", text)}
    assert listed == read
    uncommented = [line for line in served[files.VARIABLES].splitlines() if line[:1] not in "# "]
    assert uncommented == []


def test_the_recipe_starts_the_images_program(served: dict[str, str]) -> None:
    recipe = yaml.safe_load(served[files.RECIPE])
    assert recipe["container"] == NAME
    dockerfile = (ROOT / "Dockerfile").read_text()
    (entrypoint,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", dockerfile)
    program = json.loads(entrypoint)[2:]
    words = shlex.split(recipe["command"])
    assert words[words.index(program[0]) :][: len(program)] == program
    assert f"\nUSER {recipe['executor_config']['user']}\n" in dockerfile


@pytest.mark.parametrize("change", ["pull_policy: never", "profiles: [spark]", "external: true"])
def test_another_docker_compose_is_an_error(change: str) -> None:
    with pytest.raises(CheckError, match="0 times"):
        files.compose_file(COMPOSE.replace(change, "x: y"), "1-spark.1", IMAGES)
    with pytest.raises(CheckError, match="no image of rtx"):
        files.compose_file(COMPOSE, "1-spark.1", {"cpu": NAME, "spark": NAME})


@pytest.fixture
def cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arguments that cosign gets."""
    for name in (*JOB, "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "cosign"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "calls"


def test_a_job_signs_by_its_token_into_the_log(
    cosign: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert command._identity() is None
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    identity = command._identity()
    assert identity == f"https://forge.example.org/{WORKFLOW}"
    monkeypatch.setattr(engine, "parts", lambda name: [f"{name}-arm64", f"{name}-amd64"])
    command.sign_folder(tmp_path, identity, ["file"])
    command.check_image(NAME, identity)
    calls = [line for line in cosign.read_text().splitlines() if "--help" not in line]
    assert not [line for line in calls if "tlog" in line or "--key" in line]
    assert calls[0].startswith("sign-blob --yes ")
    who = f"--certificate-identity {identity} --certificate-oidc-issuer {command._ISSUER}"
    assert calls[1] == f"verify {who} {NAME}"
    kinds = [
        (kind, part) for part in ("arm64", "amd64") for kind in ("cyclonedx", "slsaprovenance1")
    ]
    assert calls[2:] == [
        f"verify-attestation {who} --type {kind} {NAME}-{part}" for kind, part in kinds
    ]


def test_images_of_another_release_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: dict[str, Any] = {"org.sparkforge.target": "cpu"}
    monkeypatch.setattr(engine, "labels", lambda name: labels)
    key = str(ROOT / "pins.yaml")  # any file
    for version in (None, "0.1-spark.1"):
        labels["org.opencontainers.image.version"] = version
        with pytest.raises(CheckError, match="no release of this checkout"):
            command.run(command.Options(join=(NAME,), key=key))
    with pytest.raises(UsageError, match="not NAME@sha256"):
        command.run(command.Options(join=("sparkforge/cpu:1",), key=key))
    here = pins.load(ROOT / "pins.yaml")
    labels["org.opencontainers.image.version"] = release_name(here, here.target("cpu"))
    for given in ((NAME,), (NAME,) * len(here.targets)):
        with pytest.raises(UsageError, match="not one image each of"):
            command.run(command.Options(join=given, key=key))


@pytest.mark.usefixtures("cosign")
def test_a_job_of_another_forge_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(MachineError, match="'GITHUB_SERVER_URL' is undefined"):
        command.sign_image(NAME, tmp_path, "cosign.key")
