"""What a build leaves for Compose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import publish, receipt
from sparkforge.build.receipt import Line
from sparkforge.build.stages.trial import trial_item
from sparkforge.pins import pins
from sparkforge.store.artefact import Artefact
from tests.support import ROOT


def written(root: Path) -> list[bytes]:
    """Return the lines of .env after a build with an image."""
    context: Any = SimpleNamespace(
        root=root,
        target_name="cpu",
        target=SimpleNamespace(smoke=object(), model=None),
        engine=object(),
        platform="linux/amd64",
    )
    image: Any = SimpleNamespace(outputs={"tag": "sparkforge/cpu:1"})
    publish.for_compose(context, image, root / "dist")
    return (root / ".env").read_bytes().splitlines()


# each was read by Docker Compose 2.26, which gave the folder back
@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("plain-1.0", b"/", b"/plain-1.0/dist/tiny-model"),
        ("my $dir #1", b"'/", b"/my $dir #1/dist/tiny-model'"),
        ("it's", b"'/", b"/it\\'s/dist/tiny-model'"),
    ],
)
def test_the_models_folder_is_what_compose_reads(
    tmp_path: Path, name: str, start: bytes, end: bytes
) -> None:
    (tmp_path / name).mkdir()
    line = written(tmp_path / name)[-1]
    assert line.startswith(b"SPARKFORGE_MODEL_DIR=" + start)
    assert line.endswith(end)


def line(stage: str, seconds: float, *, made_now: bool = True) -> Line:
    return Line(stage, Artefact(stage, "0" * 64, {}, {}, Path(), seconds), made_now)


def test_the_time_of_each_stage_is_that_of_what_this_run_made() -> None:
    lines = [
        line("sources", 1.0),
        line("sources", 2.25),
        line("series", 9.0, made_now=False),
        line("wheels", 0.5),
    ]
    assert publish.times(lines) == ["sources 3.2 s", "wheels 0.5 s"]


def test_the_image_is_found_beside_what_it_is_made_of(tmp_path: Path) -> None:
    def made(stage: str, kind: str, **outputs: Any) -> Line:
        artefact = Artefact(stage, "0" * 64, {}, {"kind": kind, **outputs}, tmp_path, 1.0)
        return Line(kind, artefact, made_now=True)

    checkpoint, unpatched = made("image", "checkpoint"), made("smoke", "environment")
    image = made("image", "image", base="sha256:1")
    assert trial_item().stage == "image"
    for found in (image, made("image", "environment")):
        assert receipt.baked([checkpoint, found, unpatched]) is found.artefact
    assert receipt.baked([checkpoint, unpatched]) is None


@pytest.mark.parametrize(
    ("target", "baked", "machine", "words"),
    [
        ("cpu", True, "x86_64", "python3 build.py serve --target cpu"),
        ("cpu", False, "x86_64", "python3 build.py --target cpu"),
        ("spark", False, "x86_64", "on a machine of linux/arm64: python3 build.py --target spark"),
        ("spark", True, "aarch64", "docker compose up -d   # the first start downloads openai/gpt"),
    ],
)
def test_the_end_of_a_build_says_what_is_next(
    monkeypatch: pytest.MonkeyPatch, target: str, baked: bool, machine: str, words: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    all_pins = pins.load(ROOT / "pins.yaml")
    chosen = all_pins.target(target)
    context: Any = SimpleNamespace(
        target_name=target, target=chosen, pins=all_pins, platform=chosen.platforms[0]
    )
    image = line("image", 1.0).artefact if baked else None
    assert publish.next_step(context, image).startswith(words)


def test_the_users_own_lines_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"# caf\xe9\nMINE=\xff\nCOMPOSE_PROFILES=spark\n")
    lines = written(tmp_path)
    assert lines[:3] == [b"# caf\xe9", b"MINE=\xff", b"COMPOSE_PROFILES=cpu"]
    assert written(tmp_path) == lines
