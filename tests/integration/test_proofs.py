"""`build.py proofs` on the smallest kernel, with the real nvcc and the real cuobjdump."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import MachineError, ProofError
from tests.support import PATIENCE_S, ROOT

NAMES = ("block-scaled-mma", "block-scaled-mma-plain")


def checkout(folder: Path) -> Path:
    """Return pins in a folder of their own, so that the user's dist/ stays as it is."""
    pins = folder / "checkout" / "pins.yaml"
    if not pins.exists():
        pins.parent.mkdir()
        shutil.copyfile(ROOT / "pins.yaml", pins)
        for name in ("requirements", "kernels"):
            (pins.parent / name).symlink_to(ROOT / name)
    return pins


def run(store: Path, *words: str, code: int = 0, **env: str) -> tuple[str, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sparkforge",
            "proofs",
            *words,
            "--store",
            store,
            "--pins",
            checkout(store.parent),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    store = tmp_path_factory.mktemp("proofs") / "store"
    out, _ = run(store, *NAMES, "--json")
    return store, json.loads(out)


def test_the_smallest_kernel_is_proved_and_its_stub_is_seen(
    proved: tuple[Path, dict[str, Any]],
) -> None:
    document = proved[1]
    assert document["ok"] is True
    assert "13." in document["nvcc"]
    found = {proof["label"]: proof for proof in document["proofs"]}
    assert set(found) == {
        "block-scaled-mma 121a",
        "block-scaled-mma 120f",
        "block-scaled-mma-plain 121",
        "block-scaled-mma-plain 120",
    }
    for arch in ("121a", "120f"):
        proof = found[f"block-scaled-mma {arch}"]
        assert proof["problems"] == []
        assert proof["kernels"][0]["mma"] == {"QMMA.SF.16832.F32.E4M3.E4M3.E8": 1}
    for arch in ("121", "120"):
        proof = found[f"block-scaled-mma-plain {arch}"]
        assert "an empty stub" in proof["problems"][0]
        assert proof["kernels"][0]["traps"] is True
    codes = {found[f"block-scaled-mma {arch}"]["kernels"][0]["code"] for arch in ("121a", "120f")}
    assert len(codes) == 1
    dist = checkout(proved[0].parent).parent / "dist" / "proofs"
    assert "| block-scaled-mma | 121a | 1 |" in (dist / "report.md").read_text()
    assert json.loads((dist / "report.json").read_text()) == document


def test_what_is_proved_is_not_compiled_again(
    proved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    store, first = proved
    # the real nvcc's version, and a compiler that must not be called
    fake = tmp_path / "nvcc"
    real = shutil.which("nvcc")
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nexit 9\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    out, _ = run(store, *NAMES, "--json", "--offline", PATH=path)
    assert json.loads(out)["proofs"] == first["proofs"]


def test_cleaning_what_is_superseded_keeps_the_proofs(
    proved: tuple[Path, dict[str, Any]],
) -> None:
    store, first = proved
    subprocess.run(
        [sys.executable, "-m", "sparkforge", "clean", "--superseded", "--store", store],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE_S,
        check=True,
    )
    kept = [path for path in (store / "artefacts").glob("proof-*/*") if path.is_dir()]
    assert len(kept) == 1 + 2 * len(first["proofs"])  # readers; machine code and facts of each


def test_a_source_that_nvcc_refuses_is_named(
    proved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo another release\nexec false\n')
    fake.write_text(fake.read_text().replace("exec false", '[ "$1" = --version ] || exit 9'))
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    _, err = run(proved[0], "block-scaled-mma", "--offline", code=ProofError.exit_code, PATH=path)
    assert "block-scaled-mma 121a: nvcc fails" in err


def test_without_nvcc_it_says_what_to_install(tmp_path: Path) -> None:
    only = tmp_path / "bin"
    only.mkdir()
    for program in ("git", "tar"):
        if found := shutil.which(program):
            (only / program).symlink_to(found)
    _, err = run(
        tmp_path / "store", "block-scaled-mma", code=MachineError.exit_code, PATH=str(only)
    )
    assert "nvcc: not installed on this machine" in err
    assert "CUDA 13.0" in err


def test_the_list_needs_no_compiler(tmp_path: Path) -> None:
    out, _ = run(tmp_path / "store", "--list", "--ci", "--json", PATH="/nowhere")
    listed = json.loads(out)
    assert listed["block-scaled-mma"]["archs"] == ["121a", "120f"]
    assert not (tmp_path / "store").exists()
