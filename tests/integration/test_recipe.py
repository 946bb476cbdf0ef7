"""The Dockerfile's own scripts, run on environments made by the real uv."""

import re
import subprocess
import sys
from pathlib import Path

from sparkforge.build.image import VENV
from sparkforge.runtime.environment import uv_program
from tests.support import ROOT, make_wheel


def test_check_refuses_missing_requirements_only(tmp_path: Path) -> None:
    uv, venv, check = uv_program(), tmp_path / "venv", tmp_path / "check"
    found = re.search(r"/tools/check\n(.*?)\nEOS\n", (ROOT / "Dockerfile").read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("/run/tools/uv", str(uv)).replace(f"/{VENV}", str(venv))
    check.write_text(text)
    check.chmod(0o755)

    def said() -> tuple[int, str]:
        done = subprocess.run([check], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, words = said()  # there is no environment
    assert code != 0 and words
    # a wheel whose name fits every machine and that notes a platform inside that none is
    note = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-manylinux2014_sbsa\n"
    strange = make_wheel(tmp_path, "one", files={"one.py": b""}, info={"WHEEL": note})
    wanting = make_wheel(tmp_path, "two", requires=("three>=2",), files={"two.py": b""})
    quiet = ("--quiet", "--offline", "--python")
    subprocess.run([uv, "venv", *quiet, sys.executable, venv], check=True)
    assert said() == (0, "")
    subprocess.run([uv, "pip", "install", "--no-deps", *quiet, venv, strange], check=True)
    code, words = said()
    assert "`one` was built for a different platform" in words  # uv still sees it
    assert code == 0
    subprocess.run([uv, "pip", "install", "--no-deps", *quiet, venv, wanting], check=True)
    code, words = said()
    assert code != 0
    assert "requires `three>=2`" in words.splitlines()[-1]
