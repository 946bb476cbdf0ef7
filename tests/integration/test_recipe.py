"""The Dockerfile's own scripts, run on environments made by the real uv."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def said(check: Path) -> tuple[int, str]:
    done = subprocess.run([check], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_check_refuses_missing_requirements_only(tmp_path: Path) -> None:
    check = script("check", r"/tools/check\n(.*?)\nEOS\n", tmp_path)
    code, words = said(check)  # there is no environment
    assert code != 0 and words
    # a wheel whose name fits every machine and that notes a platform inside that none is
    note = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-manylinux2014_sbsa\n"
    strange = make_wheel(tmp_path, "one", files={"one.py": b""}, info={"WHEEL": note})
    wanting = make_wheel(tmp_path, "two", requires=("three>=2",), files={"two.py": b""})
    uv, venv = uv_program(), tmp_path / "venv"
    quiet = ("--quiet", "--offline", "--python")
    subprocess.run([uv, "venv", *quiet, sys.executable, venv], check=True)
    assert said(check) == (0, "")
    subprocess.run([uv, "pip", "install", "--no-deps", *quiet, venv, strange], check=True)
    code, words = said(check)
    assert "`one` was built for a different platform" in words  # uv still sees it
    assert code == 0
    subprocess.run([uv, "pip", "install", "--no-deps", *quiet, venv, wanting], check=True)
    code, words = said(check)
    assert code != 0
    assert "requires `three>=2`" in words.splitlines()[-1]


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
