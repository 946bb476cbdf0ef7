"""The stage kernels: from the plugin's folder to its wheel."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.stages import kernels
from sparkforge.build.stages.kernels import FLAGS
from sparkforge.core.errors import BuildError, PinsError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.runtime import environment
from sparkforge.sources import wheelhouse
from sparkforge.store.store import Store
from sparkforge.wheels import intake
from tests.kernels import FILES, HEADER, SOURCE, toolchain, with_kernels, write
from tests.project import PLATFORM, Project
from tests.support import ROOT

KERNELS = b"kernel first 80 1024 0 0\nkernel second 40 0 0 0\n"
NAME = "demo_own-1.5-py3-none-any.whl"
CODE = "demo_own/decode/cubins"
INFO = "demo_own-1.5.dist-info"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A compiler that reads what a kernel uses from the source."""
    return toolchain(tmp_path_factory.mktemp("toolchain"))


@pytest.fixture
def own(project: Project, wheels: Mapping[str, Path]) -> Project:
    """A project with a plugin."""
    with_kernels(project, wheels, KERNELS)
    return project


def plugin(project: Project) -> Path:
    return project.root / "dist" / "tiny" / NAME


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def item(receipt: Any, label: str) -> Any:
    (found,) = (item for item in receipt["items"] if item["label"] == label)
    return found


def sha256s(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_wheel_has_package_machine_code_and_manifest(own: Project) -> None:
    receipt = own.build()
    labels = ["source demo", "series demo", "kernels", "plugin", "wheel demo"]
    assert [item["label"] for item in receipt["items"]] == labels
    held = members(plugin(own))
    package = {name: data for name, data in FILES.items() if name.endswith(".py")}
    code = [f"{CODE}/manifest.json", f"{CODE}/sm_121a.cubin", f"{CODE}/sm_90a.cubin"]
    info = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/TERMS")
    names = {name.removeprefix("own/") for name in package}
    assert set(held) == {*names, *code, *(f"{INFO}/{name}" for name in info)}
    for name, data in package.items():
        assert held[name.removeprefix("own/")] == data
    manifest = json.loads(held[f"{CODE}/manifest.json"])
    sources = {SOURCE: KERNELS, "own/csrc/more.cuh": FILES["own/csrc/more.cuh"]}
    assert (manifest["sources"], manifest["flags"]) == (sha256s(sources), list(FLAGS))
    for arch, cubin in zip(("90a", "121a"), manifest["cubins"], strict=True):
        data = held[f"{CODE}/sm_{arch}.cubin"]
        assert data == f"{SOURCE} for sm_{arch}\n".encode() + HEADER + KERNELS
        assert cubin == {
            "architecture": arch,
            "file": f"sm_{arch}.cubin",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "kernels": [
                {"name": "first", "registers": 80, "shared": 1024, "local": 0, "spills": 0},
                {"name": "second", "registers": 40, "shared": 0, "local": 0, "spills": 0},
            ],
        }
    files = sha256s({name: held[name] for name in code})
    sha256 = hashlib.sha256(plugin(own).read_bytes()).hexdigest()
    made = item(receipt, "plugin")["outputs"]
    assert made == {"file": NAME, "sha256": sha256, "version": "1.5", "kernels": files}
    assert receipt["files"][NAME] == sha256
    # nothing of it is in the other wheel
    assert not [name for name in members(own.wheel) if "own" in name or "cubin" in name]
    sbom = own.root / "dist" / "tiny" / "sbom.cdx.json"
    parts = json.loads(sbom.read_text())["components"]
    assert {part["bom-ref"] for part in parts} == {"own-demo", "own-plugin"}


def test_installers_take_the_wheel(own: Project, tmp_path: Path) -> None:
    own.build(until="kernels")
    intake.take(Store(own.store), plugin(own), hashlib.sha256(plugin(own).read_bytes()).hexdigest())
    with zipfile.ZipFile(plugin(own)) as archive:
        archive.extractall(tmp_path)
    installed = PathDistribution(tmp_path / INFO)
    wanted = {"Name": "demo-own", "Version": "1.5", "License-File": "TERMS"}
    assert {name: installed.metadata[name] for name in wanted} == wanted
    points = {(one.name, one.value, one.group) for one in installed.entry_points}
    assert points == {
        ("own", "demo_own:register", "some.plugins"),
        ("a", "b:c", "more"),
        ("d", "e:f", "more"),
    }


def test_kernels_are_compiled_again_when_a_source_changes_and_not_otherwise(own: Project) -> None:
    def states() -> list[str]:
        times = own.build("--offline", until="kernels")["run"]["items"]
        return [times[label]["state"] for label in ("kernels", "plugin")]

    own.build(until="kernels")
    assert states() == ["in the store", "in the store"]
    write(own.root, {"own/demo_own/deep/down.py": b"more = 1\n"})
    out, _ = own.run("explain", "--target", "tiny")
    assert "package.own/demo_own/deep/down.py: " in out
    assert states() == ["in the store", "made"]
    assert members(plugin(own))["demo_own/deep/down.py"] == b"more = 1\n"
    write(own.root, {"own/csrc/more.cuh": b"// less\n"})
    out, _ = own.run("explain", "--target", "tiny")
    assert "sources.own/csrc/more.cuh: " in out
    assert states() == ["made", "made"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (SOURCE, None),
        ("own/pyproject.toml", b"[project]\nname = 'x'\n"),
        ("own/pyproject.toml", b"[project"),
    ],
)
def test_wrong_folder_is_one_error(own: Project, name: str, data: bytes | None) -> None:
    (own.root / name).unlink()
    if data is not None:
        write(own.root, {name: data})
    own.run("build", "--target", "tiny", "--until", "kernels", code=PinsError.exit_code)


def test_damaged_machine_code_is_compiled_again(own: Project) -> None:
    receipt = own.build()
    (code,) = (own.store / "artefacts" / "kernels").glob("*/sm_90a.cubin")
    code.chmod(0o644)
    code.write_bytes(b"damaged")
    plugin(own).unlink()
    (made,) = (own.store / "artefacts" / "kernels").glob("*/*.whl")
    shutil.rmtree(made.parent)
    assert own.build()["run"]["items"]["kernels"]["state"] == "made"
    held = members(plugin(own))[f"{CODE}/sm_90a.cubin"]
    assert hashlib.sha256(held).hexdigest() in item(receipt, "kernels")["outputs"]["files"].values()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (KERNELS + b"error name it\nerror and again\n", f"{SOURCE}(3): error: name it"),
        (b"fatal\n", "ptxas fatal : out of luck"),
        (b"// nothing\n", "not every architecture has the same kernels"),
        (KERNELS + b"kernel third 1 0 0 0 sm_90a\n", "'third'"),
        (KERNELS + b"kernel third 1 0 8 16\n", "sm_90a third: 16 B, 8 B of stack"),
    ],
)
def test_unshippable_kernels_are_one_error(own: Project, source: bytes, words: str) -> None:
    write(own.root, {SOURCE: source})
    _, err = own.run("build", "--target", "tiny", "--until", "kernels", code=BuildError.exit_code)
    assert words in err
    if "B of stack" in words:  # unless it is listed
        own.edit_pins("spills: []", "spills: [third]")
        own.build(until="kernels")


# -- the real compiler ----------------------------------------------------------------

REAL = """\
#include <cuda_bf16.h>
#include "add.cuh"
static __device__ __constant__ float kOne = 1;
extern "C" __global__ void plus(const __nv_bfloat16* x, __nv_bfloat16* y) {
  __shared__ float kept[32];
  kept[threadIdx.x] = add(__bfloat162float(x[threadIdx.x]), kOne);
  __syncthreads();
  y[threadIdx.x] = __float2bfloat16(kept[31 - threadIdx.x]);
}
"""
ADD = "__device__ inline float add(float a, float b) { return a + b; }\n"


PINNED = pins.load(ROOT / "pins.yaml").plugin
assert PINNED is not None
PLUGIN = PINNED


def compiled(folder: Path, toolchain: Path, source: str) -> dict[str, bytes]:
    place = folder / "tree" / "own" / "csrc"
    place.mkdir(parents=True)
    (place / "kernels.cu").write_text(source)
    (place / "add.cuh").write_text(ADD)
    (folder / "out").mkdir()
    pin = PLUGIN.model_copy(update={"folder": "own/", "spills": ()})
    kernels.build(pin, folder / "tree", "13", toolchain, folder / "out")
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


def test_the_real_compiler_needs_no_other_and_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler that pins.yaml names, from the package index of this machine."""
    into, toolchain = tmp_path / "wheels", tmp_path / "toolchain"
    into.mkdir()
    wanted = wheelhouse.Wanted(ROOT / PLUGIN.requirements, (), "3.11", PLATFORM, None)
    given = (Store(tmp_path / "store"), wanted, Index(), environment.uv_program())
    wheelhouse.fill(*given, offline=False, into=into)
    kernels.unpack(into, toolchain)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CPATH", "/nonexistent")
    first = compiled(tmp_path / "a", toolchain, REAL)
    toolchain.rename(tmp_path / "another toolchain")
    toolchain = tmp_path / "another toolchain"
    assert compiled(tmp_path / "deep" / "er", toolchain, REAL) == first
    for arch in PLUGIN.architectures:
        code = first[f"sm_{arch}.cubin"]
        assert code[:4] == b"\x7fELF"
        # EM_CUDA, and the architecture in e_flags as driver 580 reads it
        assert int.from_bytes(code[18:20], "little") == 190
        assert str(tmp_path).encode() not in code
    for cubin in json.loads(first["manifest.json"])["cubins"]:
        (kernel,) = cubin["kernels"]
        assert (kernel["name"], kernel["shared"]) == ("plus", 128)
        assert 0 < kernel["registers"] < 64
        assert (kernel["local"], kernel["spills"]) == (0, 0)
    with pytest.raises(BuildError, match=r"own/csrc/kernels\.cu\(6\): error: identifier \"less"):
        compiled(tmp_path / "b", toolchain, REAL.replace("add(__", "less(__"))
