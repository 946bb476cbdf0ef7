"""What an image has to have at the end of its bake: the check itself, and how it gets there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.core.errors import CommandError, ImageError
from sparkforge.pins import pins
from sparkforge.runtime import buildx
from sparkforge.runtime.engine import BaseImage
from sparkforge.serving import needs
from tests.results import context_of
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
GPU = [name for name, one in PINS.targets.items() if one.cuda_arch is not None]


def wanted(target: str) -> list[dict[str, str]]:
    return [one.model_dump(exclude_none=True) for one in PINS.target(target).needs]


def load(name: str) -> object:
    return None


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up root in which the spark image has everything."""
    for need in wanted("spark"):
        if "program" in need:
            path = tmp_path / "bin" / need["program"]
        elif "file" in need:
            path = tmp_path / need["file"].lstrip("/")
        else:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_every_gpu_target_says_what_it_needs() -> None:
    assert GPU == ["spark", "rtx"]
    for name in GPU:
        named = {value for need in wanted(name) for key, value in need.items() if key != "package"}
        python = f"/usr/include/python{PINS.target(name).python}/Python.h"
        assert {"nvcc", "g++", "ninja", python, "/usr/local/cuda/include/curand.h"} <= named
        assert {"torch", "triton", "flashinfer"} <= named


def test_nothing_is_missing_where_all_is_there(root: Path) -> None:
    assert needs.missing(wanted("spark"), root, load) == []


@pytest.mark.parametrize(
    "need", [n for n in wanted("spark") if "module" not in n], ids=lambda need: need["package"]
)
def test_each_thing_that_is_missing_is_named_with_its_package(
    root: Path, need: dict[str, str]
) -> None:
    name = need.get("program") or need["file"]
    (root / "bin" / name if "program" in need else root / name.lstrip("/")).unlink()
    (line,) = needs.missing(wanted("spark"), root, load)
    assert line.startswith("the image lacks the ")
    assert f" {name}, of the package {need['package']}" in line


def test_a_package_that_cannot_be_imported_is_named_with_its_error(root: Path) -> None:
    def fail(name: str) -> object:
        if name == "triton":
            raise OSError("libfoo.so: cannot open\nand more")
        return None

    (line,) = needs.missing(wanted("spark"), root, fail)
    words = "OSError: libfoo.so: cannot open"
    assert line == f"the image cannot import triton, of the package triton: {words}"


def test_the_script_alone_says_all_that_is_missing(tmp_path: Path) -> None:
    said = tmp_path / "needs.json"
    said.write_text(
        json.dumps(
            [
                {"module": "no_such_module", "package": "m"},
                {"program": "no-such-program", "package": "p"},
                {"file": "/no/such/file", "package": "f"},
                {"module": "json", "package": "python3"},
            ]
        )
    )
    command: list[str | Path] = [sys.executable, "-IB", ROOT / "sparkforge/serving/needs.py", said]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "the image lacks the program no-such-program, of the package p",
        "the image lacks the file /no/such/file, of the package f",
        "the image cannot import no_such_module, of the package m: ModuleNotFoundError: No module"
        " named 'no_such_module'",
    ]
    said.write_text("[]")
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""


def step() -> str:
    """The end of the Dockerfile's last RUN: the lines that run the check."""
    recipe = (ROOT / "Dockerfile").read_text()
    last = recipe[recipe.rindex("\nRUN ") :]
    assert "source=sparkforge/serving/needs.py,target=/run/needs.py" in last
    return last[last.index("    if [ -e /run/wheels/needs.json ]") : last.index("\nCOPY ")]


@pytest.mark.parametrize(
    ("ends", "emulated", "code"),
    [
        ("exit 0", False, 0),
        ("exit 1", False, 1),
        ("exit 1", True, 1),
        ("kill -SEGV $$", False, 139),
        ("kill -SEGV $$", True, 0),
    ],
)
def test_the_step_fails_but_for_an_emulator_that_dies(
    tmp_path: Path, ends: str, emulated: bool, code: int
) -> None:
    venv = tmp_path / "python"
    venv.write_text(f"#!/bin/sh\n{ends}\n")
    venv.chmod(0o755)
    (tmp_path / "needs.json").touch()
    if emulated:
        (tmp_path / "emulated").touch()
    text = step().replace("/opt/sparkforge/venv/bin/python", str(venv))
    text = text.replace("/run/wheels", str(tmp_path))
    done = subprocess.run(
        ["/bin/sh", "-euc", text],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == code
    assert ("the emulator ended by a signal" in done.stdout) == (emulated and code == 0)


def test_a_bake_that_lacks_something_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "the image lacks the program nvcc, of the package cuda-nvcc-13-0"

    def call(*command: str, **options: Any) -> None:
        assert json.loads((tmp_path / "wheels/needs.json").read_text()) == wanted("rtx")
        raise CommandError(f"docker ended\n    #9 0.412 {line}\n    #9 ERROR: x\n    0.412 {line}")

    monkeypatch.setattr(buildx, "call", call)
    engine: Any = type("Engine", (), {"containerd_store": False})
    with pytest.raises(ImageError) as caught:
        contents = image.Contents({}, tmp_path, {}, {})
        image.build(engine, context_of("rtx"), BaseImage("b", "b"), contents, tmp_path)
    assert caught.value.what == line
    assert "system_packages of targets.rtx" in str(caught.value.remedy)
