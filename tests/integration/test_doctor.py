"""`build.py doctor` on this machine, with programs on the PATH that hang, fail or print garbage."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import CheckError
from tests import forked
from tests.support import PATIENCE_S, ROOT

STOPS = CheckError.exit_code
# a target with a GPU for this kind of machine: for another no GPU is looked at
OURS = "spark" if platform.machine() in ("aarch64", "arm64") else "rtx"


def doctor(*words: str, path: str = "", **variables: str) -> tuple[int, Any, str]:
    """Run the command with --json; returns exit code, document, and what it said beside it."""
    env = {**os.environ, **variables, "PATH": f"{path}:{os.environ['PATH']}".strip(":")}
    code, out, err = forked.run(["doctor", "--json", *words], ROOT, env)
    assert "Traceback" not in err
    return code, json.loads(out), err


def states(document: Any) -> dict[str, str]:
    return {finding["name"]: finding["state"] for finding in document["findings"]}


def test_this_machine_fits_the_cpu_target(tmp_path: Path) -> None:
    code, document, _ = doctor("--target", "cpu", "--store", str(tmp_path / "not made yet"))
    assert (code, document["ok"]) == (0, True)
    assert states(document)["machine"] == "ok"
    assert not (tmp_path / "not made yet").exists()  # it reads, and makes nothing


def program(folder: Path, name: str, script: str) -> str:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("script", "fragment"),
    [
        ("trap '' TERM; sleep 900 & sleep 900", "did not finish within"),
        ("echo 'No devices were found' >&2; exit 6", "No devices were found"),
    ],
)
def test_broken_nvidia_smi_is_an_error(tmp_path: Path, script: str, fragment: str) -> None:
    start = time.monotonic()
    path = program(tmp_path / "bin with blanks", "nvidia-smi", script)
    code, document, err = doctor("--target", OURS, path=path)
    assert time.monotonic() - start < PATIENCE_S
    assert (code, document["ok"]) == (STOPS, False)
    assert f"error: this machine cannot build or serve target {OURS}" in err
    (gpu,) = (finding for finding in document["findings"] if finding["name"] == "gpu")
    assert (gpu["state"], fragment in gpu["seen"]) == ("error", True), gpu
