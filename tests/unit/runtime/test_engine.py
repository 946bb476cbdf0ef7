"""The engine: its builder, builds, and names of images in registries."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.core.errors import MachineError, UsageError
from sparkforge.maintain import dev
from sparkforge.runtime import engine
from sparkforge.runtime.engine import Engine
from sparkforge.store.store import Store
from tests.results import build_of

# of `docker buildx inspect`
OWN = """\
Name:   default
Driver: docker

Nodes:
Name:             default
Platforms:        linux/amd64*, linux/amd64/v2, linux/arm64
"""
NATIVE = OWN.replace(", linux/arm64", "")
DIGEST = f"sha256:{'0' * 64}"
PUBLISHED = f"some/image@{DIGEST}"


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the words that docker got; it prints the file ``inspected``."""
    said = tmp_path / "said"
    (tmp_path / "inspected").write_text(OWN)
    (tmp_path / "docker").write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >'{said}'\ncat '{tmp_path}/inspected'\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return said


def holding(platform: str) -> Engine:
    """Return an engine that holds images of one platform."""
    image = SimpleNamespace(attrs={"Architecture": platform.partition("/")[2]})
    client: Any = SimpleNamespace(images=SimpleNamespace(get=lambda _: image))
    return Engine(client, "26.1.5", True)


@pytest.mark.parametrize(
    ("inspected", "base", "platform", "works"),
    [
        (OWN, "local:base", "linux/amd64", True),
        (OWN, "local:base", "linux/arm64", False),  # the base is for another
        (OWN, PUBLISHED, "linux/arm64", True),
        (NATIVE, PUBLISHED, "linux/arm64", False),  # nothing runs the programs
        ("", PUBLISHED, "linux/amd64", False),
    ],
)
def test_an_engine_that_cannot_build_is_refused(
    said: Path, inspected: str, base: str, platform: str, works: bool
) -> None:
    (said.parent / "inspected").write_text(inspected)
    with nullcontext() if works else pytest.raises(MachineError):
        engine.check_builder(holding("linux/amd64"), base, platform)


def test_dev_image_uses_the_engines_builder(store: Store, said: Path) -> None:
    """Not the builder that the user chose last: one in a container lacks the target's image."""
    rootless = Engine(None, "26.1.5", True, "rootless")  # type: ignore[arg-type]
    dev._image(build_of("cpu", store=store), rootless, "sparkforge/cpu:1")
    words = said.read_text().splitlines()
    assert "--builder=rootless" in words


def test_a_name_in_a_registry() -> None:
    for name in ("127.0.0.1:5000/x1", "ghcr.io/a/b-c", "localhost/xy"):
        assert engine.repository(name) == name
        assert engine.is_published(f"{name}@{DIGEST}")
    for text in (f"sparkforge/cpu@{DIGEST}", "r.example.org/x:1", "r.example.org/x@sha256:1"):
        assert not engine.is_published(text)


@pytest.mark.parametrize(
    "name",
    [
        "r.example.org/x:1",
        f"r.example.org/x@{DIGEST}",
        "team/xy",
        "user:password@r.example.org/x",
    ],
)
def test_another_name_is_an_error_that_does_not_quote_it(name: str) -> None:
    with pytest.raises(UsageError) as error:
        engine.repository(name)
    assert "password" not in str(error.value)
