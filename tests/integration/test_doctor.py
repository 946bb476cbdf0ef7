"""`build.py doctor` on this machine, with programs on the PATH that hang, fail or print garbage."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparkforge.runtime.servers import free_port
from tests import forked
from tests.support import PATIENCE_S, ROOT

# a target with a GPU for this kind of machine: for another no GPU is looked at
OURS = "spark" if platform.machine() in ("aarch64", "arm64") else "rtx"


def doctor(*words: str, path: str = "", **variables: str) -> tuple[int, Any, str]:
    """Run the command with --json; returns exit code, document, and what it said beside it."""
    env = {**os.environ, **variables, "PATH": f"{path}:{os.environ['PATH']}".strip(":")}
    code, out, err = forked.run(["doctor", "--json", *words], ROOT, env)
    assert "Traceback" not in err
    return code, json.loads(out), err


def states(document: Any) -> dict[str, str]:
    return {one["name"]: one["state"] for one in document["findings"]}


def test_this_machine_is_fit_for_the_cpu_target(tmp_path: Path) -> None:
    code, document, _ = doctor("--target", "cpu", "--store", str(tmp_path / "not made yet"))
    assert (code, document["ok"], document["counts"]["fail"]) == (0, True, 0)
    assert states(document)["architecture"] == "ok"
    assert not (tmp_path / "not made yet").exists()  # it reads, and makes nothing
    assert all(
        set(one) == {"name", "theme", "state", "seen", "why", "remedy"}
        for one in document["findings"]
    )


def test_a_machine_without_gpu_is_told_that_it_needs_one(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "nvidia-smi", "exit 9")
    code, document, err = doctor("--target", OURS, path=path)
    assert code == 9
    assert document["ok"] is False
    assert states(document)["gpu"] == "fail"
    assert f"error: this machine cannot build or serve target {OURS}" in err


def test_another_platform_is_one_fault_and_not_five() -> None:
    code, document, _ = doctor("--target", {"spark": "rtx", "rtx": "spark"}[OURS])
    assert code == 9
    assert states(document)["architecture"] == "fail"
    assert not {"gpu", "memory", "engine"} & set(states(document))
    assert {"python", "git", "store", "model"} <= set(states(document))


@pytest.mark.parametrize("name", ["SPARKFORGE_HF_CACHE", "HF_HUB_CACHE", "HF_HOME"])
def test_a_home_of_nobody_is_a_folder_without_the_model(name: str) -> None:
    place = {"SPARKFORGE_HF_CACHE": "", "HF_HUB_CACHE": "", name: "~nobody-of-that-name/hub"}
    code, document, _ = doctor("--target", "spark", **place)
    assert code == 9
    assert any("~nobody-of-that-name" in one["seen"] for one in document["findings"])


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
        (
            "echo 'No devices were found' >&2; exit 6",
            "failed with exit code 6: No devices were found",
        ),
        ("head -c 3000000 /dev/urandom", "not XML"),
        ("yes", "writes endless output"),
        ("kill -SEGV $$", "failed with exit code -11"),
    ],
)
def test_a_broken_nvidia_smi_is_a_finding(tmp_path: Path, script: str, fragment: str) -> None:
    start = time.monotonic()
    path = program(tmp_path / "bin with blanks", "nvidia-smi", script)
    code, document, _ = doctor("--target", OURS, path=path)
    assert time.monotonic() - start < PATIENCE_S
    assert code == 9
    (gpu,) = (one for one in document["findings"] if one["name"] == "gpu")
    assert (gpu["state"], fragment in gpu["seen"]) == ("fail", True), gpu


def test_what_was_read_elsewhere_can_be_judged_here(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "nvidia-smi", "exit 3")
    file = tmp_path / "read.json"
    token = {"HF_TOKEN": "hf_secret", "SPARKFORGE_X_TOKEN": "secret-too"}
    code, first, _ = doctor("--target", "spark", "--save", str(file), path=path, **token)
    assert code == 9
    assert "secret" not in file.read_text()
    again, second, _ = doctor("--target", "spark", "--readings", str(file))
    assert (again, second) == (9, first)


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3, "x": 1}', "\x00"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    code, document, _ = doctor("--target", "cpu", "--readings", str(tmp_path / "f"))
    assert code == 2
    assert "is not a recording" in document["error"]["what"]


@pytest.mark.parametrize("word", ["--save", "--model", "--readings"])
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, word: str) -> None:
    code, document, _ = doctor("--target", "cpu", word, str(tmp_path / "nowhere" / "x"))
    assert code == 2
    assert "nowhere/x: " in document["error"]["what"]


def test_a_store_that_cannot_be_written_stops_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, document, _ = doctor("--target", "cpu", "--store", str(tmp_path / "file" / "store"))
    assert code == 9
    assert states(document)["store"] == "fail"


def test_without_a_terminal_there_is_no_colour(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparkforge", "doctor", "--target", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "\033" not in done.stdout
    assert "ok    architecture" in done.stdout


# -- two doctors -----------------------------------------------------------------


def side(role: str, port: int, **more: str) -> dict[str, str]:
    return {
        "SPARKFORGE_CLUSTER_ROLE": role,
        "SPARKFORGE_CLUSTER_HEAD": "127.0.0.1",
        "SPARKFORGE_CLUSTER_WORKER": "127.0.0.2",
        "SPARKFORGE_CLUSTER_IFNAME": "lo",
        "SPARKFORGE_CLUSTER_PORT": str(port),
        **more,
    }


def test_two_doctors_compare_what_they_found() -> None:
    port = free_port(0) - 2
    with ThreadPoolExecutor() as pool:
        sides = [
            pool.submit(doctor, "--target", "cpu", "--cluster", **side(role, port))
            for role in ("worker", "head")
        ]
        (_, worker, _), (_, head, _) = (one.result() for one in sides)
    assert states(head)["peer"] == states(worker)["peer"] == "ok"
    assert states(worker)["time"] == "ok"  # it asks
    assert states(head)["same-driver"] == "ok"
    seen = {one["name"]: one["seen"] for one in head["findings"]}
    assert seen["peer"] == "127.0.0.2 answers; it is the worker"


def test_a_doctor_that_is_alone_says_so() -> None:
    start = time.monotonic()
    code, document, _ = doctor(
        "--target", "cpu", "--cluster", "--wait", "1", **side("head", free_port(0) - 2)
    )
    assert (code, states(document)["peer"]) == (9, "fail")
    assert time.monotonic() - start < PATIENCE_S


def test_a_machine_of_no_pair_is_told_what_to_write() -> None:
    code, document, _ = doctor("--target", "cpu", "--cluster")
    assert code == 2
    assert "SPARKFORGE_CLUSTER_ROLE is not set" in document["error"]["what"]


def test_waiting_for_nobody_is_refused() -> None:
    code, _, said = doctor("--target", "cpu", "--wait", "1")
    assert code == 2
    assert "add --cluster" in said
