"""`build.py model fetch`: what it starts, and what it makes of how that ends.

A program named docker stands in for the engine; it keeps its words and does what a test says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build import composing, modelfetch
from sparkforge.cli import main
from sparkforge.core.errors import (
    BuildError,
    FetchError,
    IntegrityError,
    MachineError,
    StoreError,
    UsageError,
)
from sparkforge.pins import pins
from tests.support import ROOT

IMAGE = "sparkforge/spark:1-aaaaaaaaaaaa"
MODEL = pins.load(ROOT / "pins.yaml").models["gpt-oss-120b"]
Run = Callable[..., int]


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the images that the engine holds."""
    held = [IMAGE]

    def on_engine(*_: object) -> list[Any]:
        return [SimpleNamespace(image=name) for name in held]

    engine = SimpleNamespace(has_image=lambda name: name in held)
    monkeypatch.setattr(modelfetch, "connect", lambda: engine)
    monkeypatch.setattr(composing, "on_engine", on_engine)
    return held


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: list[str]) -> Run:
    """Run the command on a folder that has this checkout's pins, with a docker that says words."""
    for name in (
        *modelfetch._PASSED,
        "SPARKFORGE_IMAGE",
        "SPARKFORGE_IMAGE_SPARK",
        "SPARKFORGE_HF_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pins.yaml").write_bytes((ROOT / "pins.yaml").read_bytes())
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=":")

    def start(*words: str, said: str = "", code: int = 0, target: str = "spark") -> int:
        (tools / "said").write_text(said)
        (tools / "docker").write_text(
            f'#!/bin/sh\necho "$*" >{tools}/words\nenv >{tools}/env\n'
            f"cat {tools}/said\nexit {code}\n"
        )
        (tools / "docker").chmod(0o755)
        (tools / "words").unlink(missing_ok=True)
        return main.main(
            ["model", "fetch", "--target", target, *words, "--pins", str(tmp_path / "pins.yaml")]
        )

    return start


def test_download_uses_compose_volume_and_hides_secrets(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / ".env").write_text("HTTPS_PROXY=http://me:secret@proxy.invalid\n")
    assert run("--json", said="entrypoint: downloading 31.0 of 65.0 GB\n") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "target": "spark",
        "model": MODEL.repository,
        "revision": MODEL.revision,
        "place": "sparkforge-models",
        "image": IMAGE,
        "complete": True,
    }
    assert "downloading 31.0 of 65.0 GB" in said.err
    words = (tmp_path / "bin/words").read_text()
    mount = "type=volume,source=sparkforge-models,target=/var/cache/sparkforge/huggingface"
    assert f"--mount={mount} " in words
    assert "--env=HTTPS_PROXY " in words
    assert "--env=HF_TOKEN " in words
    assert words.endswith(
        f"{IMAGE} -- /opt/sparkforge/venv/bin/python -I {modelfetch._PROGRAM}"
        f" /var/cache/sparkforge/huggingface/hub {MODEL.repository} {MODEL.revision}\n"
    )
    assert "secret" not in words + said.out + said.err
    environment = (tmp_path / "bin/env").read_text()
    assert "HF_TOKEN=hf_secret\n" in environment
    assert "HTTPS_PROXY=http://me:secret@proxy.invalid\n" in environment


def test_download_program_is_in_the_image() -> None:
    assert (ROOT / "sparkforge/serving" / Path(modelfetch._PROGRAM).name).is_file()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"sparkforge/serving/*.py {Path(modelfetch._PROGRAM).parent}/" in dockerfile
    assert 'ENTRYPOINT ["/usr/bin/tini"' in dockerfile
    assert "HF_HOME=/var/cache/sparkforge/huggingface " in dockerfile
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"models: {{name: {composing.MODELS_VOLUME}," in compose


def test_host_folder_is_mounted(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SPARKFORGE_HF_CACHE=./my cache\n")
    assert run() == UsageError.exit_code
    assert not (tmp_path / "bin/words").exists()
    (tmp_path / "my cache").mkdir()
    assert run() == 0
    assert f"--mount=type=bind,source={tmp_path}/my cache," in (tmp_path / "bin/words").read_text()


def test_dry_run_starts_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["complete"] is False
    assert "docker run --rm --pull=never" in said.err
    assert not (tmp_path / "bin/words").exists()


@pytest.mark.parametrize(
    ("said", "code", "error"),
    [
        ("entrypoint: error: the hub lies", 65, IntegrityError),
        ("entrypoint: error: no network", 68, FetchError),
        ("entrypoint: error: the disk is full", 73, StoreError),
        ("entrypoint: error: no token", 78, FetchError),
        ("python: can't open file 'hub.py'", 2, MachineError),
        ("", 125, MachineError),
    ],
)
def test_failed_download_is_one_error(
    run: Run, capsys: pytest.CaptureFixture[str], said: str, code: int, error: type[Exception]
) -> None:
    assert run(said=said + "\n", code=code) == error.exit_code  # type: ignore[attr-defined]
    err = capsys.readouterr().err
    assert err.count("error: ") == 1
    assert "Traceback" not in err


def test_missing_image_or_model_is_an_error(
    run: Run, images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    images.clear()
    assert run() == BuildError.exit_code
    assert "python3 build.py --target spark" in capsys.readouterr().err
    assert run(target="cpu") == UsageError.exit_code
    assert "serves no model from the hub" in capsys.readouterr().err
