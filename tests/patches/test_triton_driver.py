"""Triton's module for the driver, built with an image, is what Triton loads: no compiler is called.

The pinned Triton with our series, and a stand-in for the driver: no GPU is at hand.
"""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from sparkforge.build.context import Context
from sparkforge.core.run import call
from sparkforge.serving import image_build
from tests.patches import triton_aot
from tests.patches.checkout import ROOT

PROGRAM = ROOT / "sparkforge" / "serving" / "image_build.py"
# where a server starts: the first thing that Triton does with a GPU
START = """
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().get_device_properties(0)["max_shared_mem"])
"""


@pytest.fixture(scope="module")
def packages(cpu_context: Context) -> Path:
    """The patched Triton."""
    return triton_aot.packages(cpu_context)


@pytest.fixture(scope="module")
def built(
    packages: Path, patched_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """What two builds of an image for a GPU make, as their share folders."""
    header = call(patched_python, "-c", "import sysconfig; print(sysconfig.get_path('include'))")
    if shutil.which("gcc") is None or not Path(header.stdout.decode().strip(), "Python.h").exists():
        pytest.skip("no C compiler, or no Python headers here")
    folder = tmp_path_factory.mktemp("driver")
    wheels = folder / "wheels"
    (wheels / "share").mkdir(parents=True)
    (wheels / "share" / "profile.json").write_text(json.dumps({"cuda_arch": "12.1"}))
    backend = packages / "triton" / "backends" / "nvidia"
    with zipfile.ZipFile(wheels / "triton-0+spark.1-cp311-cp311-any.whl", "w") as wheel:
        for path in (backend / "driver.c", *backend.glob("include/**/*.h")):
            wheel.write(path, path.relative_to(packages))
    shares = folder / "first", folder / "of a second image"
    for share in shares:
        call(patched_python, "-IB", PROGRAM, "triton", wheels, folder / "nothing", share / "triton")
    return shares


def modules(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.glob("**/*.so")}


@pytest.fixture(scope="module")
def driver(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that has what the module needs of it; properties are 4711."""
    (module,) = built[0].glob("triton/*.so")
    symbols = call("nm", "-D", "--undefined-only", module).stdout.decode().split()
    names = {name for name in symbols if name.startswith("cu")} - {"cuDeviceGetAttribute"}
    lines = [f"int {name}(void) {{ return 0; }}" for name in sorted(names)]
    lines.append("int cuDeviceGetAttribute(int *to) { *to = 4711; return 0; }")
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.c").write_text("\n".join(lines))
    call("gcc", "-shared", "-fPIC", folder / "cuda.c", "-o", folder / "libcuda.so.1")
    return folder


def start(
    python: Path, packages: Path, driver: Path, cache: Path, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Start Triton where no compiler is on the PATH."""
    programs = cache.parent / "bin"
    programs.mkdir()
    if (file := shutil.which("file")) is not None:  # Python calls it for the key, as in the build
        (programs / "file").symlink_to(file)
    env = {
        "PATH": str(programs),
        "PYTHONPATH": str(packages),
        "LD_LIBRARY_PATH": str(driver),
        "TRITON_CACHE_DIR": str(cache),
        "HOME": str(cache.parent),
        **(more or {}),
    }
    command = [os.fspath(python), "-P", "-c", START]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_two_builds_give_the_same_module(built: tuple[Path, Path]) -> None:
    first, second = (modules(share / "triton") for share in built)
    assert first == second
    (module,) = first.values()
    assert b"driver.c" in module  # in a failed assert's message
    assert b"/tmp" not in module


def test_triton_loads_it_and_calls_no_compiler(
    built: tuple[Path, Path],
    packages: Path,
    patched_python: Path,
    driver: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, said = tmp_path / "cache", list[str]()
    monkeypatch.syspath_prepend(packages)
    variables = {"TRITON_CACHE_DIR": str(cache)}
    chosen = image_build.seed(built[0], variables, said.append)
    assert said == ["Triton's module for the driver: the image's is used"]
    done = start(patched_python, packages, driver, cache, chosen)
    assert (done.returncode, done.stdout.strip()) == (0, "4711"), done.stderr
    assert modules(cache) == modules(built[0] / "triton")


def test_without_it_triton_wants_a_compiler(
    packages: Path, patched_python: Path, driver: Path, tmp_path: Path
) -> None:
    """The control: why the image has it."""
    named = {"TRITON_LIBCUDA_PATH": str(driver)}
    done = start(patched_python, packages, driver, tmp_path / "cache", named)
    assert "Failed to find C compiler" in done.stderr
