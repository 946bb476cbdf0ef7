"""Devices as a driver tells them, FlashInfer's modules, and the folder of compiled kernels."""

import os
import subprocess
from pathlib import Path

import pytest

from sparkforge.serving import devices


def driver(folder: Path, count: int, integrated: int = -1) -> str:
    """A driver with that many devices, of which one may be integrated: by its number."""
    source = folder / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 0; }\n"
        f"int cuDeviceGetCount(int *n) {{ *n = {count}; return 0; }}\n"
        "int cuDeviceGet(int *d, int i) { *d = i; return 0; }\n"
        "int cuDeviceGetAttribute(int *v, int a, int d)\n"
        f"{{ *v = a == 75 ? 12 : a == 18 ? d == {integrated} : d; return 0; }}\n"
        "int cuDeviceTotalMem_v2(unsigned long *n, int d) { *n = 1000 + d; return 0; }\n"
    )
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_each_device_is_asked_for_its_capability(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = devices.capabilities(driver(tmp_path, 2))
    assert there == [(12, 0), (12, 1)]
    devices.check("12.1", there, strict=True)
    assert not capsys.readouterr().err
    devices.check("9.0", there, strict=True)
    assert "for devices of compute capability 9.0, not 12.0, 12.1" in capsys.readouterr().err


def test_an_integrated_device_says_how_much_memory_it_counts(tmp_path: Path) -> None:
    assert devices.unified_bytes(driver(tmp_path, 2, integrated=1)) == 1001
    other = tmp_path / "other"
    other.mkdir()
    assert devices.unified_bytes(driver(other, 2)) is None
    assert devices.unified_bytes("libnosuch.so.1") is None


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ("", {"VLLM_HAS_FLASHINFER_CUBIN": "1", "FLASHINFER_DISABLE_JIT": "1"}),
        ("nvcc", {"FLASHINFER_DISABLE_JIT": "1"}),  # alone it compiles nothing
        ("nvcc g++", {"MAX_JOBS": "2"}),
    ],
)
def test_without_compilers_flashinfer_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: str, chosen: dict[str, str]
) -> None:
    (tmp_path / "flashinfer_jit_cache.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in programs.split():
        (tmp_path / name).touch(mode=0o755)
    given = {"PATH": str(tmp_path)}
    assert devices.flashinfer_variables(given) == chosen
    assert devices.flashinfer_variables({**given, **dict.fromkeys(chosen, "0")}) == {}


def test_the_last_builds_are_kept(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()  # not of ours
    for number, build in enumerate(("a", "b", "c", "d")):
        folder, _ = devices.caches(tmp_path, tmp_path, build, {})
        os.utime(folder / "used", (number, number))
    (tmp_path / "inputs.json").write_text("{}")
    devices.caches(tmp_path, tmp_path, "d", {})  # of other inputs
    (tmp_path / "inputs.json").unlink()
    there = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert there == [*"cdd", "models"]


def test_variables_point_into_the_folder_unless_the_user_has_set_them(tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    folder, found = devices.caches(
        tmp_path / "jit", tmp_path, "a", {"TRITON_CACHE_DIR": own, "HOME": "/root"}
    )
    assert found["TRITON_CACHE_DIR"] == own
    assert found["HOME"] == str(folder / "home")
    inside = set(found.values()) - {own}
    assert all(Path(path).is_dir() and path.startswith(str(folder)) for path in inside)
