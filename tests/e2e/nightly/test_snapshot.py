"""The same image on another day: apt reads the snapshot that pins.yaml names for a pinned base."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ROOT, Build, clone, runner
from ..mirror import Mirror
from ..served import docker
from ..targets import small_target

FIRST, SECOND = "20261121T000000Z", "20261128T000000Z"
WORDS = ("--target", "rtx", "--engine", "docker")


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, registry: str, mirror: Mirror
) -> Path:
    """A clone whose small image starts from a pinned base in the registry."""
    root = tmp_path_factory.mktemp("snapshot") / "sparkforge"
    clone(ROOT, root)
    mirror.publish("1.0", FIRST)
    digest = mirror.base(base_image, f"{registry}/made-up:1")
    docker("push", f"{registry}/made-up:1")
    pins = small_target(root, "rtx", "linux/amd64").rename(root / "pins.yaml")
    text = pins.read_text()
    image = f"repository: {registry}/made-up, tag: 1, index: {digest}, apt: {mirror.pin(FIRST)}"
    for place, more in (
        ("images:\n", f"images:\n  made-up: {{{image}}}\n"),
        ('    cuda_arch: "12.0"', '    base: made-up\n    cuda_arch: "12.0"'),
    ):
        assert text.count(place) == 1, place
        text = text.replace(place, more)
    pins.write_text(text)
    return root


def baked(build: Build, mirror: Mirror) -> tuple[Any, set[str]]:
    """Build the image; returns what the receipt has of it, and the versions of haproxy."""
    receipt = build(*WORDS, *mirror.words, "--until", "image")
    made = next(one["outputs"] for one in receipt["items"] if one["label"] == "image")
    return made, {line.split()[2] for line in made["system"] if " haproxy " in line}


def test_a_snapshot_gives_the_same_image_after_the_archive_moved_on(
    root: Path, mirror: Mirror
) -> None:
    build = runner(root)
    first, versions = baked(build, mirror)
    assert versions == {"1.0"}
    mirror.publish("2.0", SECOND)
    mirror.asked.clear()
    found = build("verify", *WORDS, *mirror.words)  # without a cache, as on another machine
    assert found["same"]
    (image,) = (one for one in found["results"] if one["name"] == first["tag"])
    assert image["first"] == image["second"] == first["digest"]
    assert mirror.asked and {path.split("/")[1] for path in mirror.asked} == {FIRST}

    pins = root / "pins.yaml"
    pins.write_text(pins.read_text().replace(f"snapshot: {FIRST},", f"snapshot: {SECOND},"))
    second, versions = baked(build, mirror)
    assert versions == {"2.0"} and second["digest"] != first["digest"]
    labels = json.loads(docker("inspect", second["tag"]))[0]["Config"]["Labels"]
    assert labels["org.sparkforge.apt.snapshot"] == SECOND
    assert build("verify", second["tag"])["matches"]
