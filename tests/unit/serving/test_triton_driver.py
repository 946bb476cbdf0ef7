"""Triton's module for the driver: when an image's build makes it, and how a server gets it.

tests/patches/test_triton_driver.py builds it, and has the real Triton load it.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.pins import pins
from sparkforge.serving import triton_driver
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
MODULE = "cuda_utils.cpython-312-aarch64-linux-gnu.so"


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed Triton's folder."""
    folder = tmp_path / "installed" / "triton" / "backends" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "driver.c").write_text("int driver;\n")
    (folder.parent.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return folder


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """The image's folder, with a module."""
    module = tmp_path / "share" / "triton" / MODULE
    module.parent.mkdir(parents=True)
    module.write_bytes(b"the image's")
    return tmp_path / "share"


def seeded(share: Path, variables: dict[str, str]) -> list[str]:
    said: list[str] = []
    triton_driver.seed(share, variables, said.append)
    return said


def place_of(cache: Path, backend: Path, libcuda: Path) -> Path:
    return cache / triton_driver.key(backend, str(libcuda)) / MODULE


# -- a server's cache ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "place"),
    [
        ({"TRITON_CACHE_DIR": "own", "TRITON_HOME": "t", "HOME": "h"}, "own"),
        ({"TRITON_CACHE_DIR": "", "TRITON_HOME": "t", "HOME": "h"}, "t/.triton/cache"),
        ({"HOME": "h"}, "h/.triton/cache"),
    ],
)
def test_the_module_is_copied_to_where_triton_looks(
    share: Path, backend: Path, tmp_path: Path, names: dict[str, str], place: str
) -> None:
    variables = {name: value and str(tmp_path / value) for name, value in names.items()}
    assert seeded(share, variables) == ["Triton's module for the driver: the image's is used"]
    path = place_of(tmp_path / place, backend, share / "triton")
    assert path.read_bytes() == b"the image's"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert seeded(share, variables) == []


def test_triton_is_told_the_folder_that_the_key_is_of(
    share: Path, backend: Path, tmp_path: Path
) -> None:
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    chosen = triton_driver.seed(share, variables, print)
    assert chosen == {"TRITON_LIBCUDA_PATH": str(share / "triton")}
    own = {**variables, "TRITON_LIBCUDA_PATH": "/own"}
    assert triton_driver.seed(share, own, print) == {"TRITON_LIBCUDA_PATH": "/own"}
    assert place_of(tmp_path / "cache", backend, Path("/own")).exists()


def test_a_module_that_is_there_stays(share: Path, backend: Path, tmp_path: Path) -> None:
    path = place_of(tmp_path / "cache", backend, share / "triton")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"compiled here")
    assert seeded(share, {"TRITON_CACHE_DIR": str(tmp_path / "cache")}) == []
    assert path.read_bytes() == b"compiled here"


def test_without_a_module_nothing_is_done(tmp_path: Path) -> None:
    assert seeded(tmp_path, {"TRITON_CACHE_DIR": str(tmp_path / "cache")}) == []
    assert not (tmp_path / "cache").exists()


def test_a_failed_copy_is_a_warning_and_leaves_nothing(
    share: Path, backend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (line,) = seeded(share, {"TRITON_CACHE_DIR": str(tmp_path / "file")})
    assert line.startswith("warning: Triton's module for the driver cannot be copied into ")
    assert "Not a directory" in line
    assert line.endswith("Triton compiles it, which needs gcc")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    (line,) = seeded(share, {"TRITON_CACHE_DIR": str(tmp_path / "cache")})
    assert "No space left on device" in line
    assert triton_driver.seed(share, {"TRITON_CACHE_DIR": str(tmp_path / "file")}, print) == {}
    path = place_of(tmp_path / "cache", backend, share / "triton")
    assert list(path.parent.iterdir()) == []


# -- the image's build ---------------------------------------------------------------------------


def wheels(folder: Path, profile: Any) -> Path:
    """Write what the Dockerfile gets: a wheel of Triton, and the profile."""
    (folder / "share").mkdir(parents=True)
    if profile is not None:
        (folder / "share" / "profile.json").write_text(json.dumps(profile))
    with zipfile.ZipFile(folder / "triton-3.7.1-cp312-cp312-any.whl", "w") as wheel:
        wheel.writestr("triton/backends/nvidia/driver.c", "#error no compiler is called\n")
    return folder


@pytest.mark.parametrize("profile", [None, {}, {"cuda_arch": None}, {"max_model_len": 8}])
def test_a_target_without_a_gpu_gets_none(tmp_path: Path, profile: Any) -> None:
    triton_driver.main(wheels(tmp_path / "w", profile), tmp_path / "house", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_image_without_triton_gets_none(tmp_path: Path) -> None:
    ours = wheels(tmp_path / "w", {"cuda_arch": "12.1"})
    next(ours.glob("triton-*")).unlink()
    triton_driver.main(ours, tmp_path / "house", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacking", ["gcc", "Python.h"])
def test_without_gcc_or_headers_the_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "gcc" else "/bin/gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path / "include"))
    ours = wheels(tmp_path / "w", {"cuda_arch": "12.1"})
    with pytest.raises(SystemExit) as caught:
        triton_driver.main(ours, tmp_path / "house", tmp_path / "out")
    assert lacking in str(caught.value)
    assert image._LACKS.search(str(caught.value))  # which build.py shows, with a hint


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
def test_a_source_that_does_not_compile_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    ours = wheels(tmp_path / "w", {"cuda_arch": "12.1"})
    with pytest.raises(SystemExit, match=r"driver\.c does not compile: gcc's exit code is 1"):
        triton_driver.main(ours, tmp_path / "house", tmp_path / "out")


def test_every_gpu_target_gets_one() -> None:
    """The profile in the image says that there is a GPU."""
    for name, target in PINS.targets.items():
        assert PINS.profile_of(target).get("cuda_arch") == target.cuda_arch, name
