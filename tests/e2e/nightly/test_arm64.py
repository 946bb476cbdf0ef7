"""The small spark image for arm64 (small.py), baked on this machine and run under emulation."""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.pins import pins
from tests.modules import SMALLEST
from tests.support import ROOT

from ..served import docker
from ..small import Small, has_pack

COMPILERS = ("nvcc", "gcc", "g++", "cc", "c++", "clang")
EM_AARCH64, EM_CUDA = b"\xb7\x00", b"\xbe\x00"  # of ELF files
TOOLKIT = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")  # read by NVIDIA's


@pytest.fixture(scope="module")
def baked(small_spark: Small) -> Any:
    return small_spark.bake()


def run(tag: str, *words: str, options: tuple[str, ...] = ()) -> str:
    """Run something in the image, emulated; returns all that it said."""
    command = ["docker", "run", "--rm", "--platform", "linux/arm64", *options, tag, *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


@pytest.fixture(scope="module")
def told(baked: Any) -> Any:
    """What one Python in the image says of itself and of what lies there; each costs seconds."""
    code = f"""
import hashlib, importlib.metadata, json, os, platform, shutil, sys
sys.path.insert(0, "/opt/sparkforge/bin")
import msgspec, pydantic_core
from importlib.util import find_spec
from pathlib import Path
from sparkforge.serving import checkpoint
spec = find_spec("flashinfer_jit_cache")
pack = spec and json.load(open(Path([*spec.submodule_search_locations][0]) / "manifest.json"))
print(json.dumps({{
    "machine": platform.machine(),
    "flashinfer": importlib.metadata.version("flashinfer-python"),
    "msgspec": msgspec.json.decode(b"[1]"),
    "vocabulary": hashlib.sha256(checkpoint.vocabulary()).hexdigest(),
    "pack": pack and [pack["architecture"], *(one["name"] for one in pack["modules"])],
    "compilers": [name for name in {COMPILERS} if shutil.which(name)],
    "gpu": [os.environ.get(name) for name in {TOOLKIT}],
    "profile": json.load(open("/{image.SHARE}/profile.json")),
}}))
"""
    options = ("--entrypoint", "/opt/sparkforge/venv/bin/python")
    return json.loads(run(baked["tag"], "-c", code, options=options))


def test_every_program_in_the_image_is_for_arm64(baked: Any, small_spark: Small) -> None:
    found = small_spark.build("verify", baked["tag"])
    assert found["matches"], found["problems"]
    assert found["digest"] == baked["digest"]
    assert found["checked"]["wheels in dist"] == len({"flashinfer", "plugin"}) + has_pack()
    container = docker("create", "--platform", "linux/arm64", baked["tag"])
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            assert export.stdout is not None
            with tarfile.open(fileobj=export.stdout, mode="r|") as archive:
                files = (archive.extractfile(member) for member in archive if member.isreg())
                heads = [file.read(20) for file in files if file is not None]
    finally:
        docker("rm", container)
    machines = [head[18:20] for head in heads if head[:4] == b"\x7fELF"]
    assert len(machines) > 300
    assert set(machines) == {EM_AARCH64, EM_CUDA}  # of the plugin


def test_python_and_the_packages_run_there(told: Any) -> None:
    assert told["machine"] == "aarch64"
    assert told["flashinfer"].endswith("+spark.1")
    assert told["msgspec"] == [1]


def test_there_is_no_compiler_and_the_toolkit_gives_the_gpu(told: Any) -> None:
    assert told["compilers"] == []
    assert told["gpu"] == ["all", "compute,utility"]


def test_flashinfer_s_modules_are_in_the_image(told: Any, small_spark: Small) -> None:
    assert told["pack"] == ["sm121f", SMALLEST.name]
    plan = small_spark.build("--target", "spark", "--until", "packs", "--dry-run")["plan"]
    (step,) = [one for one in plan if one["stage"] == "packs"] or [None]
    assert (step is not None and step["state"] == "in the store") is has_pack()


def test_the_vocabulary_of_the_arm64_package_is_the_pinned_one(told: Any) -> None:
    pinned = pins.load(ROOT / "pins.yaml").vocabularies["harmony"].sha256
    assert told["vocabulary"] == pinned


def test_the_entrypoint_makes_the_spark_profiles_command(
    baked: Any, told: Any, tmp_path: Path
) -> None:
    fake = tmp_path / "vllm"
    fake.write_text("#!/bin/sh\necho started with $# words\nexit 3\n")
    fake.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    said = run(
        baked["tag"],
        "--gpu-memory-utilization",
        "0.5",
        options=(
            "--volume",
            f"{fake}:/opt/sparkforge/venv/bin/vllm:ro",
            "--env",
            "SPARKFORGE_ALLOW_OPEN=1",
            "--volume",
            f"{model}:/model:ro",
            "--env",
            "SPARKFORGE_CHECKS=backends=warn",
        ),
    )
    assert "no CUDA device is visible in this container" in said
    assert "vllm serve /model --uds " in said
    assert "--moe-backend marlin --attention-backend FLASHINFER" in said
    assert "started with" in said
    assert told["profile"]["moe_backend"] == "marlin"


def test_the_health_check_runs_there_and_finds_no_server(baked: Any) -> None:
    script = "/opt/sparkforge/bin/healthcheck.py"
    said = run(
        baked["tag"],
        "-I",
        script,
        options=(
            "--entrypoint",
            "/opt/sparkforge/venv/bin/python",
            "--network",
            "none",
        ),
    )
    assert "Traceback" not in said
    assert "FileNotFoundError" in said


def test_a_base_of_another_platform_is_one_clear_error(small_spark: Small, base_image: str) -> None:
    done = subprocess.run(
        ["python3", "build.py", "--target", "spark", "--base", base_image],
        cwd=small_spark.checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 8
    assert "is not for linux/arm64, as the target is" in done.stderr
