"""The choice of a builder, on what buildx prints (recorded)."""

from __future__ import annotations

import pytest

from sparkforge import buildx
from sparkforge.engine import Engine
from sparkforge.errors import EngineError

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


def test_what_buildx_prints_is_read() -> None:
    own = buildx.parse("default", OWN)
    assert (own.driver, own.buildkit) == ("docker", "v0.0.0+unknown")
    assert own.platforms == {"linux/amd64", "linux/amd64/v2", "linux/arm64"}
    other = buildx.parse("b", CONTAINER)
    assert other.driver == "docker-container"
    assert "linux/amd64" in other.platforms
    assert buildx.parse("c", "").platforms == frozenset()


def test_a_builder_in_a_container_sees_no_local_base() -> None:
    other, engine = buildx.parse("b", CONTAINER), Held("linux/amd64")
    with pytest.raises(EngineError, match="sees registries only"):
        buildx.check(other, engine, "local:base", "linux/amd64")
    buildx.check(other, engine, REFERENCE, "linux/amd64")


def test_base_and_builder_must_be_for_the_platform() -> None:
    own, engine = buildx.parse("default", OWN), Held("linux/amd64")
    buildx.check(own, engine, "local:base", "linux/amd64")
    buildx.check(own, Held("linux/arm64"), "local:base", "linux/arm64")
    with pytest.raises(EngineError, match="is for linux/amd64, and the target for linux/arm64"):
        buildx.check(own, engine, "local:base", "linux/arm64")
    native = buildx.parse("default", OWN.replace(", linux/arm64", ""))
    with pytest.raises(EngineError, match="runs no programs for linux/arm64") as caught:
        buildx.check(native, engine, REFERENCE, "linux/arm64")
    assert "qemu-user-static" in caught.value.remedy
