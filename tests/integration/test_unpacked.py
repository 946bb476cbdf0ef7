"""Environments of a small project: a wheel is unpacked once, whatever wheelhouse it is in."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.project import Project
from tests.support import add_project, make_wheel, sha256


@pytest.fixture
def lock(project: Project, tmp_path: Path) -> Any:
    """Write the target's lock; the wheels it names lie on the index."""

    def write(*names: str) -> None:
        lines = []
        for name in names:
            path = make_wheel(tmp_path / "third", name, "1.0", {f"{name}.py": b"here = True\n"})
            add_project(project.server, name, {path.name: path.read_bytes()})
            lines.append(f"{name}==1.0 --hash=sha256:{sha256(path.read_bytes())}\n")
        (project.root / "requirements" / "tiny.txt").write_text("".join(lines))

    return write


def environment(receipt: Any, store: Path) -> Path:
    (key,) = [item["key"] for item in receipt["items"] if item["label"] == "environment"]
    return store / "artefacts" / "image" / str(key)[:32] / "venv"


def archives(store: Path) -> int:
    """How many wheels uv has unpacked so far."""
    return len(list((store / "unpacked" / "cache" / "archive-v0").iterdir()))


def test_only_new_wheels_are_unpacked(project: Project, lock: Any) -> None:
    # uv must take nothing in a path for a requirement or a marker
    project.store = project.store.with_name("a #store ; of\n%20 mine")
    lock("first")
    one = environment(project.build(until="image"), project.store)
    assert archives(project.store) == 1
    lock("first", "second")
    two = environment(project.build(until="image"), project.store)
    assert two != one
    assert archives(project.store) == 2
    for venv, names in ((one, "first"), (two, "first, second, demo")):
        code = f"import {names}; assert first.here"
        subprocess.run([venv / "bin" / "python", "-c", code], check=True, cwd="/")
    same = [next(venv.rglob("first.py")).stat().st_ino for venv in (one, two)]
    assert same[0] == same[1]  # linked, not copied
    # another link to a wheel, and a wheelhouse that is gone, change nothing
    for wheel in project.store.rglob("first-1.0-*.whl"):
        os.link(wheel, wheel.parent / f"{wheel.name}.more")
        break
    (project.root / "requirements" / "tiny.txt").write_text(
        (project.root / "requirements" / "tiny.txt").read_text() + "# a comment\n"
    )
    project.build(until="image")
    assert archives(project.store) == 2


def test_damaged_wheel_is_not_in_sbom(project: Project, lock: Any) -> None:
    lock("first")
    project.build(until="image")
    sbom = project.wheel.parent / "sbom.cdx.json"
    before = sbom.read_bytes()
    for path in project.store.glob("artefacts/wheelhouse/*/wheels/first-1.0-*.whl"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes().replace(b"first", b"fjrst"))
    sbom.unlink()
    project.build(until="image")
    assert sbom.read_bytes() == before
