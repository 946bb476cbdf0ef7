"""scripts/lock.sh with a loopback index."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sparkforge.runtime.interpreter import uv_program
from tests.support import ROOT, Page, Server, make_wheel, sha256


@pytest.mark.parametrize("yanked", [False, True])
def test_yanked_version_is_not_locked(server: Server, tmp_path: Path, yanked: bool) -> None:
    wheel = make_wheel(tmp_path / "f", "demo", "1.0")
    data = wheel.read_bytes()
    server.add(f"/f/{wheel.name}", Page(data))
    mark = 'data-yanked="broken"' if yanked else ""
    link = f'<a href="/f/{wheel.name}#sha256={sha256(data)}" {mark}>{wheel.name}</a>'
    server.add("/simple/demo/", Page(link.encode()))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lock.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "driver.in").write_text("demo==1.0\n")
    env = {
        **os.environ,
        "UV": str(uv_program()),
        "UV_DEFAULT_INDEX": server.url("/simple"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "lock.sh", "driver.txt"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    lock = tmp_path / "requirements" / "driver.txt"
    assert (done.returncode, lock.exists()) == ((1, False) if yanked else (0, True)), done.stderr
