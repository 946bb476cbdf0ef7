"""`build.py proofs --wheel` on small wheels, with the real nvcc and the real cuobjdump."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.errors import ProofError, UsageError, WheelError
from sparkforge.inspect.proofs.units import HERE
from tests.integration.test_proofs import checkout, run
from tests.support import make_wheel

SOURCE = HERE / "block_scaled.cu"
CUBINS = "vllm_sparkforge/decode/cubins"
PTX = "arch=compute_120f,code=compute_120f"


def native(*archs: str) -> list[str]:
    return [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]


def compiled(folder: Path, name: str, codes: list[str]) -> bytes:
    out = folder / f"{name}.so"
    words = [word for code in codes for word in ("-gencode", code)]
    subprocess.run(
        ["nvcc", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *words, SOURCE, "-o", out],
        check=True,
        timeout=300,
    )
    return out.read_bytes()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a store, and libraries for several architectures."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    folder = tmp_path_factory.mktemp("wheel-proofs")
    codes = {
        "good": native("120f", "90"),
        "plain": native("120"),
        "other": native("120a", "90"),
        "ptx": [PTX],
    }
    return folder / "store", {name: compiled(folder, name, made) for name, made in codes.items()}


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    return make_wheel(folder, "demo", "1.0", files)


def prove(
    store: Path, path: Path, code: int = 0, target: str = "spark"
) -> tuple[dict[str, Any], str]:
    _, err = run(store, "--wheel", str(path), "--target", target, "--json", code=code)
    report = checkout(store.parent).parent / "dist" / "proofs" / f"wheels-{target}.json"
    return json.loads(report.read_text()), err


def test_a_library_for_the_device_keeps_the_contract(
    built: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    store, code = built
    files = {"demo/kernels.so": code["good"], "demo/script.so": b"INPUT(other)"}
    document, _ = prove(store, wheel(tmp_path, files))
    (library,) = document["wheels"][0]["libraries"]
    assert library["images"] == {"120f": 1, "90": 1}
    assert (library["kernels"], library["absent"]) == (1, [])
    assert library["mma"] == {"QMMA.SF.16832.F32.E4M3.E4M3.E8": 1}
    (readers,) = (store / "artefacts" / "proof-readers").glob("*/bin")
    # a library is read once, whichever wheel it is in
    for name in ("cuobjdump", "nvdisasm"):
        (readers / name).rename(tmp_path / name)
    prove(store, wheel(tmp_path, {"other/same.so": code["good"]}))
    for name in ("cuobjdump", "nvdisasm"):
        (tmp_path / name).rename(readers / name)


def test_a_stub_is_named(built: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    store, code = built
    path = wheel(tmp_path, {"demo/kernels.so": code["plain"]})
    document, err = prove(store, path, ProofError.exit_code)
    (problem,) = document["wheels"][0]["libraries"][0]["problems"]
    assert (problem["rule"], problem["kernel"]) == ("stub", "block_scaled")
    assert "failed: demo-1.0" in err
    assert "demo/kernels.so: 1 kernels" in err


def test_what_loads_is_the_targets_own(
    built: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    store, code = built
    path = wheel(tmp_path, {"demo/kernels.so": code["other"]})
    document, _ = prove(store, path, ProofError.exit_code)
    (problem,) = document["wheels"][0]["libraries"][0]["problems"]
    assert problem["rule"] == "loads"
    assert "120a, 90: nothing of it runs on 12.1" in problem["text"]
    document, _ = prove(store, path, target="rtx")  # 120a is for 12.0
    assert document["ok"] is True


def test_ptx_is_not_machine_code(built: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    store, code = built
    path = wheel(tmp_path, {"demo/kernels.so": code["ptx"]})
    document, _ = prove(store, path, ProofError.exit_code)
    library = document["wheels"][0]["libraries"][0]
    assert (library["kernels"], library["ptx"]) == (0, {"120f": 1})
    assert library["ptx_only"] == ["block_scaled"]
    assert [one["rule"] for one in library["problems"]] == ["native"]


def test_cubins_of_a_folder_are_one_library(
    built: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    store, _ = built
    cubins = {}
    for arch in ("90", "121a"):
        out = tmp_path / f"sm_{arch}.cubin"
        flags = ("-std=c++17", f"-arch=sm_{arch}", "-cubin")
        subprocess.run(["nvcc", *flags, SOURCE, "-o", out], check=True, timeout=300)
        cubins[f"{CUBINS}/{out.name}"] = out.read_bytes()
    document, _ = prove(store, wheel(tmp_path, cubins), ProofError.exit_code)
    (library,) = document["wheels"][0]["libraries"]
    assert library["file"] == f"{CUBINS}/*.cubin"
    assert library["images"] == {"121a": 1, "90": 1}
    (problem,) = library["problems"]  # pins.yaml needs decode kernels there
    assert problem["rule"] == "mma"


def test_wrong_input_is_one_error(tmp_path: Path) -> None:
    store = tmp_path / "store"

    def refused(*words: str, code: int) -> str:
        return run(store, *words, code=code)[1]

    usage = UsageError.exit_code
    assert "--wheel needs --target" in refused("--wheel", "x.whl", code=usage)
    assert "use one of: rtx, spark" in refused("--wheel", "--target", "cpu", code=usage)
    assert "no such file" in refused("--wheel", "x.whl", "--target", "spark", code=usage)
    assert "no wheels" in refused("--wheel", "--target", "spark", code=usage)
    assert "takes no NAME" in refused("decode-kernels", "--wheel", code=usage)
    assert "--target needs --wheel" in refused("--target", "spark", "--list", code=usage)
    (tmp_path / "x.whl").write_bytes(b"no wheel")
    text = refused(
        "--wheel", str(tmp_path / "x.whl"), "--target", "spark", code=WheelError.exit_code
    )
    assert "x.whl: not a readable wheel" in text
