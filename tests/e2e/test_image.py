"""The image, made by a real engine on a base of Debian's packages. test_accept.py serves it."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.results import context_of

from .conftest import Build
from .served import docker


def test_the_image_serves_and_without_the_patch_refuses(image: Any) -> None:
    assert image["smoke"]["tokens"] > 0
    assert "No MXFP4 MoE backend" in image["smoke"]["release"]


def test_no_build_tools_and_no_root_in_the_image(image: Any) -> None:
    tag = image["image"]["tag"]
    tools = "nvcc gcc g++ cc c++ clang make pip pip3 uv git"
    look = f'id -u; for p in {tools}; do [ -z "$(command -v $p)" ] || echo $p; done'
    said = docker("run", "--rm", "--entrypoint", "/bin/sh", tag, "-c", look)
    assert said == "10001"


def test_the_image_has_our_vllm_under_its_name(image: Any) -> None:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    said = docker("run", "--rm", "--entrypoint", "python", image["image"]["tag"], "-c", code)
    assert said == image["wheel vllm"]["version"]


def test_labels_name_upstream_commit_and_series(image: Any) -> None:
    labels = json.loads(
        docker("inspect", "--format", "{{json .Config.Labels}}", image["image"]["image_id"])
    )
    commit = context_of("cpu").pins.upstreams["vllm"].commit_or_unknown
    assert labels["org.sparkforge.vllm.commit"] == commit
    assert len(labels["org.sparkforge.vllm.series"]) == 64
    assert len(labels["org.sparkforge.vllm.tree.release"]) == 40


def test_verify_matches_the_image_with_the_checkout(image: Any, build: Build) -> None:
    found = build("verify", image["image"]["image_id"])
    assert found["matches"]
    assert found["digest"] == image["image"]["digest"]
    assert found["checked"]["installed files"] > 10_000
    assert found["checked"]["wheels in dist"] == len({"vllm", "plugin"})
    assert {f"org.sparkforge.vllm.{key}" for key in ("commit", "series", "tag")} <= set(
        found["labels"]
    )


def test_a_missing_base_is_one_clear_error(checkout: Path, base_image: str) -> None:
    done = subprocess.run(
        ["python3", "build.py", "--target", "cpu", "--base", "no/such:image"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 8
    assert "no such image in the engine" in done.stderr
    assert "Traceback" not in done.stderr
