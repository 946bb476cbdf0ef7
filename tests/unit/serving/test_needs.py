"""What an image must and must not have at the end of its bake: the check, and how it gets there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.build.context import Tools
from sparkforge.core.errors import BuildError, CommandError
from sparkforge.pins import pins
from sparkforge.runtime import engine as engines
from sparkforge.runtime.engine import BaseImage
from sparkforge.serving import needs
from tests.results import context_of
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
GPU = [name for name, one in PINS.targets.items() if one.cuda_arch is not None]


NEEDS = [
    {"absent": "nvcc"},
    {"absent": "g++"},
    {"program": "ninja", "package": "p"},
    {"file": "/usr/include/x.h", "package": "f"},
    {"library": "libc.so.6", "package": "libc6"},
    {"module": "triton", "package": "triton"},
]


def load(name: str) -> object:
    return None


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up root that has everything, and no compiler."""
    for name in ("bin/ninja", "usr/include/x.h"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(needs, "CUDA", str(tmp_path / "cuda" / "bin"))
    return tmp_path


def test_every_gpu_target_has_no_compiler_and_what_its_wheels_need() -> None:
    assert GPU == ["spark", "rtx"]
    for name in GPU:
        there = image.needs(context_of(name))
        absent = {one["absent"] for one in there if "absent" in one}
        assert absent == {"nvcc", "gcc", "g++", "cc", "c++", "clang"}
        named = {value for one in there for key, value in one.items() if key != "package"}
        assert {"libcudart.so", "torch", "triton", "flashinfer"} <= named
        # which the stage that compiles Triton's module needs
        python = f"python{PINS.target(name).python}-dev"
        assert {"gcc", "libc6-dev", python} == set(PINS.target(name).build_packages)


def test_the_image_of_two_machines_has_what_nccl_opens_for_roce() -> None:
    target = PINS.target("spark")
    libraries = {one.library: one.package for one in target.needs}
    for library in ("libibverbs.so.1", "libmlx5.so.1"):
        assert libraries[library] in target.system_packages


def test_nothing_is_wrong_where_all_is_there_and_no_compiler(root: Path) -> None:
    assert needs.missing(NEEDS, root, load) == []


@pytest.mark.parametrize("name", ["bin/ninja", "usr/include/x.h"])
def test_each_thing_that_is_missing_is_named_with_its_package(root: Path, name: str) -> None:
    (root / name).unlink()
    (line,) = needs.missing(NEEDS, root, load)
    assert line.startswith("the image lacks the ")
    assert f"{Path(name).name}, of the package " in line


def test_a_library_that_the_loader_does_not_find_is_missing(root: Path) -> None:
    (line,) = needs.missing([{"library": "libno-such.so", "package": "p"}], root, load)
    assert line.startswith("the image lacks the library libno-such.so, of the package p: ")


@pytest.mark.parametrize(("name", "place"), [("g++", "bin"), ("nvcc", "bin"), ("nvcc", "cuda/bin")])
def test_a_compiler_is_named_with_its_place(root: Path, name: str, place: str) -> None:
    program = root / place / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch(mode=0o755)
    (line,) = needs.missing(NEEDS, root, load)
    assert line == f"the image has {program}, which the target excludes"
    assert image._HAS.search(line)


def test_a_package_that_cannot_be_imported_is_named_with_its_error(root: Path) -> None:
    def fail(name: str) -> object:
        if name == "triton":
            raise OSError("libfoo.so: cannot open\nand more")
        return None

    (line,) = needs.missing(NEEDS, root, fail)
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


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            "the image lacks the library libcudart.so, of the package nvidia-cuda-runtime: no",
            "system_packages of targets.rtx",
        ),
        (
            "the image has /bin/nvcc, /bin/gcc, which the target excludes",
            "remove them from absent of targets.rtx",
        ),
    ],
)
def test_a_bake_with_something_wrong_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, remedy: str
) -> None:
    def call(*command: str, **options: Any) -> None:
        written = json.loads((tmp_path / "wheels/needs.json").read_text())
        assert written == image.needs(context_of("rtx"))
        assert {"SERVE_FROM=plain", "serve-gpu"} <= set(command)
        raise CommandError(f"docker ended\n    #9 0.412 {line}\n    #9 ERROR: x\n    0.412 {line}")

    monkeypatch.setattr(engines, "call", call)
    engine: Any = type("Engine", (), {"containerd_store": False})
    with pytest.raises(BuildError) as caught:
        contents = image.Contents({}, tmp_path, {}, {})
        image.build(engine, Tools(), context_of("rtx"), BaseImage("b", "b"), contents, tmp_path)
    assert caught.value.what == line
    assert remedy in str(caught.value.remedy)
