"""The Dockerfile's own scripts, run on environments made by the real uv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build.image import VENV
from sparkforge.check.verify import imagecheck
from sparkforge.check.verify.imagecheck import File
from sparkforge.runtime.environment import uv_program
from tests.support import ROOT, make_wheel, sha256

BIN, PYTHON = f"{sys.base_prefix}/bin", "{}.{}".format(*sys.version_info)


def script(name: str, pattern: str, folder: Path) -> Path:
    """Take a part of the recipe as a program, for a folder of ours."""
    found = re.search(pattern, (ROOT / "Dockerfile").read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("/run/tools/uv", str(uv_program()))
    text = text.replace(f"/{VENV}", str(folder / "venv"))
    text = text.replace("/usr/bin", BIN).replace("${PYTHON_VERSION}", PYTHON)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def check(tmp_path: Path) -> Path:
    """The script that holds what is installed against its own requirements, for our folders."""
    return script("check", r"/tools/check\n(.*?)\nEOS\n", tmp_path)


def install(folder: Path, *wheels: Path) -> None:
    uv, venv = uv_program(), folder / "venv"
    subprocess.run(
        [uv, "venv", "--quiet", "--offline", "--python", sys.executable, venv], check=True
    )
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", venv, *wheels],
        check=True,
    )


def said(script: Path) -> tuple[int, str]:
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def strange(folder: Path, name: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel whose name fits every machine and that notes a platform inside that none is."""
    note = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-manylinux2014_sbsa\n"
    return make_wheel(
        folder, name, requires=requires, files={f"{name}.py": b""}, info={"WHEEL": note}
    )


def test_unknown_platform_in_wheel_passes(check: Path, tmp_path: Path) -> None:
    install(tmp_path, strange(tmp_path, "one"), make_wheel(tmp_path, "two", files={"two.py": b""}))
    code, words = said(check)
    assert "`one` was built for a different platform" in words  # uv still sees it
    assert code == 0


def test_missing_requirement_fails(check: Path, tmp_path: Path) -> None:
    install(tmp_path, strange(tmp_path, "one", requires=("three>=2",)))
    code, words = said(check)
    assert code != 0
    assert "requires `three>=2`" in words.splitlines()[-1]


def test_complete_environment_prints_nothing(check: Path, tmp_path: Path) -> None:
    install(tmp_path, make_wheel(tmp_path, "two", files={"two.py": b""}))
    assert said(check) == (0, "")


def test_missing_environment_fails(check: Path) -> None:
    code, words = said(check)  # there is no environment
    assert code != 0
    assert words


def test_verify_knows_every_file_of_an_environment(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path, "two", files={"two.py": b"", "two-1.0.data/scripts/two": b"#!python\n"}
    )
    wanted = tmp_path / "wanted"
    wanted.write_text(f"two==1.0 --hash=sha256:{sha256(wheel.read_bytes())}\n")
    make = script("make", r"\n    (/run/tools/uv venv .*?); \\\n    /run/tools/install", tmp_path)
    subprocess.run(["sh", "-euc", make.read_text()], check=True)
    install = script("install", r"/tools/install\n(.*?)\nEOS\n", tmp_path)
    subprocess.run([install, tmp_path, wanted], check=True)
    found = {}
    for path in (tmp_path / "venv").rglob("*"):
        name = f"{VENV}/{path.relative_to(tmp_path / 'venv')}"
        if path.is_symlink():
            target = str(path.readlink()).replace(BIN, "/usr/bin")
            found[name] = File(f"link to {target}")
        elif path.is_file():
            data = path.read_bytes().replace(f"home = {BIN}".encode(), b"home = /usr/bin")
            found[name] = File(sha256(data), data)
    context: Any = SimpleNamespace(target=SimpleNamespace(python=PYTHON))
    records = imagecheck.records(found, imagecheck.site_of(PYTHON))
    assert imagecheck.installed(found, records, context)[1] == []
