"""The choice of a builder, on what buildx prints (recorded)."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from sparkforge.core.errors import MachineError
from sparkforge.maintain import dev
from sparkforge.runtime import buildx
from sparkforge.runtime.engine import Engine
from sparkforge.store.store import Store
from tests.results import build_of

OWN = """\
Name:   default
Driver: docker

Nodes:
Name:             default
Endpoint:         default
Status:           running
BuildKit version: v0.0.0+unknown
Platforms:        linux/amd64, linux/amd64/v2, linux/arm64
Labels:
 org.mobyproject.buildkit.worker.executor: containerd
"""
CONTAINER = OWN.replace("Driver: docker", "Driver: docker-container").replace(
    "linux/amd64,", "linux/amd64*,"
)
REFERENCE = f"some/image@sha256:{'a' * 64}"


class Held(Engine):
    """An engine that holds one image."""

    def __init__(self, platform: str) -> None:
        super().__init__(None, "26.1.5", True)  # type: ignore[arg-type]
        object.__setattr__(self, "held", platform)

    def platform_of(self, image: str) -> str:
        return str(self.__dict__["held"])


def test_buildx_inspect_is_parsed() -> None:
    own = buildx.parse("default", OWN)
    assert own.driver == "docker"
    assert own.platforms == {"linux/amd64", "linux/amd64/v2", "linux/arm64"}
    other = buildx.parse("b", CONTAINER)
    assert other.driver == "docker-container"
    assert "linux/amd64" in other.platforms
    assert buildx.parse("c", "").platforms == frozenset()


def test_container_builder_refuses_local_base() -> None:
    other, engine = buildx.parse("b", CONTAINER), Held("linux/amd64")
    with pytest.raises(MachineError, match="reads from registries only"):
        buildx.check(other, engine, "local:base", "linux/amd64")
    buildx.check(other, engine, REFERENCE, "linux/amd64")


def test_base_of_other_platform_is_refused() -> None:
    own, engine = buildx.parse("default", OWN), Held("linux/amd64")
    buildx.check(own, engine, "local:base", "linux/amd64")
    buildx.check(own, Held("linux/arm64"), "local:base", "linux/arm64")
    with pytest.raises(MachineError, match="is for linux/amd64, but the target is for linux/arm64"):
        buildx.check(own, engine, "local:base", "linux/arm64")
    native = buildx.parse("default", OWN.replace(", linux/arm64", ""))
    with pytest.raises(MachineError, match="cannot run programs for linux/arm64") as caught:
        buildx.check(native, engine, REFERENCE, "linux/arm64")
    assert "qemu-user-static" in caught.value.remedy


def test_dev_image_uses_the_engines_builder(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the builder that the user chose last: one in a container lacks the target's image."""
    said = tmp_path / "said"
    (tmp_path / "docker").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >'{said}'\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    engine = Engine(None, "26.1.5", True, "rootless")  # type: ignore[arg-type]
    dev._image(build_of("cpu", store=store), engine, "sparkforge/cpu:1")
    words = said.read_text().splitlines()
    assert words[words.index("--builder") + 1] == "rootless"


def test_image_build_command(tmp_path: Path) -> None:
    request = buildx.ImageBuild(
        tmp_path / "Dockerfile",
        tmp_path,
        "own",
        ("--load", "--tag", "demo:1"),
        stage="serve",
        platform="linux/arm64",
        arguments={"BASE": "b", "SYSTEM_PACKAGES": "gcc git"},
        labels={"org.demo": "a b"},
        contexts={"wheels": tmp_path / "wheels"},
        options=("--no-cache",),
        ca_bundle=tmp_path / "ca.pem",
    )
    command = [str(word) for word in request.command()]
    assert command[:5] == ["docker", "buildx", "build", "--builder", "own"]
    assert command[-1] == str(tmp_path)
    pairs = list(pairwise(command))
    for pair in (
        ("--tag", "demo:1"),
        ("--file", f"{tmp_path}/Dockerfile"),
        ("--target", "serve"),
        ("--platform", "linux/arm64"),
        ("--build-arg", "SYSTEM_PACKAGES=gcc git"),
        ("--label", "org.demo=a b"),
        ("--build-context", f"wheels={tmp_path}/wheels"),
        ("--secret", f"id=ca,src={tmp_path}/ca.pem"),
    ):
        assert pair in pairs
    assert "--no-cache" in command
