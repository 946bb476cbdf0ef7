"""scripts/lock.sh with a loopback index."""

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sparkforge.runtime.environment import uv_program
from tests.support import ROOT, Page, Server, make_wheel, sha256


@pytest.mark.parametrize(
    ("wanted", "locked"), [("demo", "demo==2.0"), ("demo==1.0", None), ("demo==3.0", None)]
)
def test_only_versions_of_some_age_that_are_not_yanked_are_locked(
    server: Server, tmp_path: Path, wanted: str, locked: str | None
) -> None:
    now = datetime.now(UTC)
    files = []
    for version, days, yanked in (("1.0", 90, True), ("2.0", 60, False), ("3.0", 2, False)):
        wheel = make_wheel(tmp_path / "f", "demo", version)
        data = wheel.read_bytes()
        files.append(
            {
                "filename": wheel.name,
                "url": server.add(f"/f/{wheel.name}", Page(data)),
                "hashes": {"sha256": sha256(data)},
                "upload-time": (now - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "yanked": yanked,
            }
        )
    page = {"meta": {"api-version": "1.1"}, "name": "demo", "files": files}
    kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    server.add("/simple/demo/", Page(json.dumps(page).encode(), headers=kind))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lock.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "driver.in").write_text(f"{wanted}\n")
    env = {
        **os.environ,
        "UV": str(uv_program()),
        "UV_DEFAULT_INDEX": server.url("/simple"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    words = ["bash", str(tmp_path / "scripts" / "lock.sh"), "driver.txt"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    lock = tmp_path / "requirements" / "driver.txt"
    assert done.returncode == (0 if locked else 1), done.stderr
    assert lock.exists() == (locked is not None)
    assert locked is None or locked in lock.read_text()
