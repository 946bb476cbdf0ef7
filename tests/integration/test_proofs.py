"""Wheels on the smallest kernel, with the real nvcc and the real cuobjdump."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import BuildError, CheckError, UsageError
from tests.support import PATIENCE_S, ROOT, make_wheel

SOURCE = ROOT / "tests/patches/cuda/block_scaled.cu"
CUBINS = "vllm_sparkforge/decode/cubins"
MMA = {"QMMA.SF.16832.F32.E4M3.E4M3.E8": 1}


def checkout(folder: Path) -> Path:
    """Return pins in a folder of their own, so that the user's dist/ stays as it is."""
    pins = folder / "checkout" / "pins.yaml"
    if not pins.exists():
        pins.parent.mkdir()
        shutil.copyfile(ROOT / "pins.yaml", pins)
        for name in ("requirements", "kernels"):
            (pins.parent / name).symlink_to(ROOT / name)
    return pins


def run(store: Path, *words: str | Path, code: int = 0, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--store", store, "--pins", checkout(store.parent)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


def check(store: Path, wheel: Path, code: int = 0, target: str = "spark") -> Any:
    """Return the document of `build.py proofs`."""
    run(store, "sparkforge", "proofs", "--wheel", wheel, "--target", target, code=code)
    folder = checkout(store.parent).parent / "dist" / "proofs"
    return json.loads((folder / f"wheels-{target}.json").read_text())


def compiled(folder: Path, name: str, *archs: str) -> bytes:
    out = folder / f"{name}.so"
    kinds = [
        "arch=compute_120f,code=compute_120f"
        if one == "ptx"
        else f"arch=compute_{one},code=sm_{one}"
        for one in archs
    ]
    words = [word for kind in kinds for word in ("-gencode", kind)]
    subprocess.run(
        ["nvcc", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *words, SOURCE, "-o", out],
        check=True,
        timeout=PATIENCE_S,
    )
    return out.read_bytes()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    return tmp_path_factory.mktemp("proofs") / "store"


def test_library_for_the_device_keeps_the_contract(store: Path, tmp_path: Path) -> None:
    code = compiled(tmp_path, "good", "120f", "90")
    files = {"demo/kernels.so": code, "demo/script.so": b"INPUT(other)"}
    (library,) = check(store, make_wheel(tmp_path, files=files))["libraries"]
    assert library["images"] == {"120f": 1, "90": 1}
    assert (library["kernels"], library["mma"], library["problems"]) == (1, MMA, [])


@pytest.mark.parametrize(
    ("archs", "rule", "kernel"),
    [
        (("120",), "stub", "block_scaled"),
        (("ptx",), "native", "block_scaled"),
    ],
)
def test_broken_rule_names_the_kernel(
    store: Path, tmp_path: Path, archs: tuple[str, ...], rule: str, kernel: str
) -> None:
    wheel = make_wheel(tmp_path, files={"demo/kernels.so": compiled(tmp_path, "x", *archs)})
    (library,) = check(store, wheel, CheckError.exit_code)["libraries"]
    (problem,) = library["problems"]
    assert (problem["rule"], problem["kernel"]) == (rule, kernel)


def test_cubins_of_a_folder_are_one_library(store: Path, tmp_path: Path) -> None:
    cubins = {}
    for arch in ("90", "121a"):
        out = tmp_path / f"sm_{arch}.cubin"
        flags = ("-std=c++17", f"-arch=sm_{arch}", "-cubin")
        subprocess.run(["nvcc", *flags, SOURCE, "-o", out], check=True, timeout=PATIENCE_S)
        cubins[f"{CUBINS}/{out.name}"] = out.read_bytes()
    (library,) = check(store, make_wheel(tmp_path, files=cubins), CheckError.exit_code)["libraries"]
    assert library["file"] == f"{CUBINS}/*.cubin"
    assert library["images"] == {"121a": 1, "90": 1}
    (problem,) = library["problems"]  # pins.yaml needs decode kernels there
    assert problem["rule"] == "mma"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--wheel", "x.whl"), UsageError.exit_code),  # no target
        (("--target", "cpu"), UsageError.exit_code),  # no contract
        (("--wheel", "missing.whl", "--target", "spark"), UsageError.exit_code),
        (("--target", "spark"), UsageError.exit_code),  # no build yet
        (("--wheel", str(ROOT / "README.md"), "--target", "spark"), BuildError.exit_code),
    ],
)
def test_wrong_input_is_one_error(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    run(tmp_path / "store", "sparkforge", "proofs", *words, code=code)
