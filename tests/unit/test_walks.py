"""Two rows of "Where does my change go?" (docs/architecture.md), walked in a copy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

PARTS = ("sparkforge", "patches", "kernels", "requirements")
FILES = ("build.py", "pins.yaml", "Dockerfile", "docker-compose.yml", "CHANGELOG.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in PARTS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, root)
    return root


def run(root: Path, *words: str) -> Any:
    """Run a command of the copy; returns its JSON document."""
    env = {**os.environ, "PYTHONPATH": str(root), "SPARKFORGE_STORE": str(root.parent / "store")}
    command = [sys.executable, "-P", "-m", "sparkforge", *words, "--json"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_target_is_pins_and_a_lock(copy: Path) -> None:
    lock = "requirements/mine-linux-amd64.txt"
    shutil.copy(copy / "requirements/cpu-linux-amd64.txt", copy / lock)
    document = yaml.safe_load((copy / "pins.yaml").read_text())
    mine = {**document["targets"]["cpu"], "summary": "mine", "requirements": {"linux/amd64": lock}}
    block = yaml.safe_dump({"mine": mine}).replace("\n", "\n  ").rstrip()
    pins = (copy / "pins.yaml").read_text().replace("\ntargets:\n", f"\ntargets:\n  {block}\n", 1)
    (copy / "pins.yaml").write_text(pins)
    planned = run(copy, "--target", "mine", "--engine", "none", "--dry-run")
    usual = run(copy, "--target", "cpu", "--engine", "none", "--dry-run")
    labels = [[one["label"] for one in plan["plan"]] for plan in (planned, usual)]
    assert labels[0] == labels[1] != []
    assert run(copy, "doctor", "--target", "mine")["target"] == "mine"


def test_a_check_of_doctor_is_a_function_and_its_line(copy: Path) -> None:
    path = copy / "sparkforge/check/doctor/checks.py"
    added = '''def mine(seen: Machine, want: Want) -> Finding:
    """The reason for it."""
    return ok(f"for {want.name}")


# -- all checks'''
    text = path.read_text().replace("# -- all checks", added, 1)
    path.write_text(
        text.replace('    "machine": (', '    "mine": ("", mine),\n    "machine": (', 1)
    )
    found = {one["name"]: one for one in run(copy, "doctor", "--target", "cpu")["findings"]}
    assert (found["mine"]["state"], found["mine"]["seen"]) == ("ok", "for cpu")
