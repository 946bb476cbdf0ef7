"""A virtual environment takes our wheels by their recorded hash, from wherever the store is."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from sparkforge.core.errors import ImageError
from sparkforge.core.hashing import sha256_file
from sparkforge.runtime import environment
from tests.support import make_wheel

VERSION = ".".join(platform.python_version_tuple()[:2])


def bake(place: Path, wheel: Path, sha256: str) -> Path:
    (place / "wheels").mkdir(exist_ok=True)
    (place / "lock.txt").touch()
    (place / "made").mkdir()
    return environment.install(
        python=Path(sys.executable),
        lock=place / "lock.txt",
        wheelhouse=place / "wheels",
        unpacked=place,
        target="tiny",
        wheels={wheel: sha256},
        folder=place / "made",
    )


@pytest.mark.parametrize("name", ["plain", "with #, ; and space"])
def test_our_wheels_are_installed_by_their_hash(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    wheel = make_wheel(place / "ours", version="1.0+spark.1")
    venv = bake(place, wheel, sha256_file(wheel))
    assert (venv / "lib" / f"python{VERSION}" / "site-packages/demo/__init__.py").is_file()
    assert [path.name for path in (place / "made").iterdir()] == ["venv"]


def test_a_wheel_of_ours_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "ours", version="1.0+spark.1")
    with pytest.raises(ImageError, match=r"[Hh]ash"):
        bake(tmp_path, wheel, "0" * 64)


def test_byte_code_of_the_same_files_is_shared(tmp_path: Path) -> None:
    first, second = (tmp_path / name / "venv/lib/python/demo" for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir(parents=True)
        for name in ("ours", "kept"):
            (folder / f"{name}.py").write_text("x = 1\n")
    for name in ("shared", "kept"):
        (first / f"{name}.py").write_text("x = 1\n")
        (second / f"{name}.py").unlink(missing_ok=True)
        (second / f"{name}.py").hardlink_to(first / f"{name}.py")
    for name in ("ours", "kept", "shared", "gone"):
        (first / "__pycache__").mkdir(exist_ok=True)
        (first / "__pycache__" / f"{name}.cpython-311.pyc").write_text("first")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "kept.cpython-311.pyc").write_text("second")
    # what a server is writing, before it gets its name
    (first / "__pycache__" / "shared.cpython-311.pyc.140234").write_text("half")
    environment.share_byte_code(tmp_path / "first", tmp_path / "second")
    found = {path.name: path.read_text() for path in (second / "__pycache__").iterdir()}
    assert found == {"shared.cpython-311.pyc": "first", "kept.cpython-311.pyc": "second"}


def test_byte_code_that_cannot_be_linked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, where the kernel protects links, or a file that has just gone."""
    first, second = (tmp_path / name / "venv/lib/python/demo" for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir(parents=True)
    for name in ("a", "b"):
        (first / f"{name}.py").write_text("x = 1\n")
        (second / f"{name}.py").hardlink_to(first / f"{name}.py")
    (first / "__pycache__").mkdir()
    for name in ("a", "b"):
        (first / "__pycache__" / f"{name}.cpython-311.pyc").write_text(name)
    link = Path.hardlink_to

    def refused(self: Path, target: Path) -> None:
        if self.name.startswith("a."):
            raise PermissionError(1, "Operation not permitted")
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", refused)
    environment.share_byte_code(tmp_path / "first", tmp_path / "second")
    assert [path.name for path in (second / "__pycache__").iterdir()] == ["b.cpython-311.pyc"]
