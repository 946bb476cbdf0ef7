"""`python3 build.py --target cpu` without an engine: the README's first command."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from wheel.wheelfile import WheelFile

from sparkforge.sources.project import store_of

from .conftest import Build


@pytest.fixture(scope="module")
def receipt(build: Build) -> Any:
    words = ("--target", "cpu", "--engine", "none", "--force", "smoke")
    return build(*words, VLLM_CPU_OMP_THREADS_BIND="auto")  # as users have it


def item(receipt: Any, label: str) -> Any:
    return next(one for one in receipt["items"] if one["label"] == label)


def test_the_served_model_answers_and_the_unpatched_release_refuses(receipt: Any) -> None:
    smoke = item(receipt, "smoke")["outputs"]
    assert smoke["tokens"] > 0
    assert "No MXFP4 MoE backend" in smoke["release"]


def test_dense_layers_in_mxfp4_are_served(receipt: Any, build: Build, checkout: Path) -> None:
    published = (checkout / "dist" / "cpu" / "receipt.json").read_bytes()
    words = ("--target", "cpu", "--engine", "none")
    again = build(*words, "--", "--mxfp4-layers", "qkv,o,lm_head")
    smoke = item(again, "smoke with arguments")
    assert smoke["inputs"]["arguments"] == ["--mxfp4-layers", "qkv,o,lm_head"]
    plain = item(receipt, "smoke")["outputs"]
    assert smoke["outputs"]["tokens"] == plain["tokens"]
    assert (checkout / "dist" / "cpu" / "receipt.json").read_bytes() == published


def test_the_wheel_is_published_with_its_checksum(receipt: Any, checkout: Path) -> None:
    out = item(receipt, "wheel vllm")["outputs"]
    wheel = checkout / "dist" / "cpu" / out["file"]
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == out["sha256"]
    assert f"{out['sha256']}  {out['file']}" in (wheel.parent / "SHA256SUMS").read_text()


def test_every_hash_in_the_wheels_record_holds(receipt: Any, checkout: Path) -> None:
    wheel = checkout / "dist" / "cpu" / item(receipt, "wheel vllm")["outputs"]["file"]
    # what `wheel unpack` reads by, without writing a GB: a member that is not as RECORD has it, or
    # is not in it, is an error
    with WheelFile(wheel) as archive:
        for name in archive.namelist():
            archive.read(name)
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(info).decode()
    assert "\nName: vllm\n" in metadata
    assert f"\nVersion: {item(receipt, 'wheel vllm')['outputs']['version']}\n" in metadata
    assert "torchvision" not in metadata


def test_a_second_build_makes_nothing(receipt: Any, build: Build) -> None:
    again = build("--target", "cpu", "--engine", "none")
    assert {state["state"] for state in again["run"]["items"].values()} == {"in the store"}
    assert again["items"] == receipt["items"]


def test_the_environment_has_exactly_one_vllm(receipt: Any, checkout: Path) -> None:
    store = store_of(None).root
    key = item(receipt, "environment")["key"]
    python = store / "artefacts" / "image" / key[:32] / "venv" / "bin" / "python"
    # that it can be imported, the smoke test has shown
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == item(receipt, "wheel vllm")["outputs"]["version"]


def test_a_second_cold_build_gives_the_same_wheel(receipt: Any, build: Build) -> None:
    # in another folder and another store, which share nothing but the downloads, by another umask
    found = build("verify", "--target", "cpu", "--engine", "none")
    wheels = [item(receipt, label)["outputs"]["sha256"] for label in ("wheel vllm", "plugin")]
    both = [(sha256, sha256) for sha256 in wheels]
    assert [(one["first"], one["second"]) for one in found["results"]] == both
