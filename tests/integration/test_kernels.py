"""The stage kernels: from a patch's CUDA sources to files of the wheel."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import cubins
from sparkforge.build.compile.assembling import assemble
from sparkforge.build.compile.natives import Decision
from sparkforge.build.compile.recipe import Recipe
from sparkforge.build.compile.running import Made
from sparkforge.core.errors import CommandError, CompileError, WheelError
from sparkforge.core.index import Index
from sparkforge.pins import pins
from sparkforge.pins.compiling import Kernels
from sparkforge.runtime import interpreter
from sparkforge.series.series import Patched
from sparkforge.sources import wheelhouse
from sparkforge.sources.sources import Source
from sparkforge.store.codekey import code_of
from sparkforge.store.store import Store
from sparkforge.wheels import overlay
from tests.integration.test_verify import SITE, bake
from tests.kernels import HEADER, LOCK, toolchain, with_kernels
from tests.project import FILES, PATCHED, PLATFORM, Project
from tests.support import EPOCH, ROOT, make_wheel, record_line

SOURCE = b"kernel first 80 1024 0 0\nkernel second 40 0 0 0\n"
SOURCES: Mapping[str, bytes | None] = {
    "demo/mod.py": PATCHED,
    "csrc/own/all.cu": SOURCE,
    "csrc/own/more.cuh": b"// more\n",
}
PACKAGE = {name: data for name, data in FILES.items() if name.startswith("demo/")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A compiler that reads what a kernel uses from the source."""
    return toolchain(tmp_path_factory.mktemp("toolchain"))


@pytest.fixture
def own(project: Project, wheels: Mapping[str, Path]) -> Project:
    """A project whose patch has kernels."""
    with_kernels(project, wheels)
    project.patch(SOURCES)
    return project


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def kernels(receipt: Any) -> Any:
    (item,) = (item for item in receipt["items"] if item["stage"] == "kernels")
    return item


def test_the_wheel_has_machine_code_and_a_manifest(own: Project) -> None:
    receipt = own.build()
    assert [item["label"] for item in receipt["items"]] == [
        "source demo",
        "series demo",
        "kernels demo",
        "wheel demo",
    ]
    held = members(own.wheel)
    assert held["demo/mod.py"] == PATCHED
    record = held["demo-1.0+spark.3.dist-info/RECORD"].decode().splitlines()
    for arch in ("90a", "121a"):
        member = f"demo/own/sm_{arch}.cubin"
        assert held[member] == b"csrc/own/all.cu for sm_%s\n" % arch.encode() + HEADER + SOURCE
        assert ",".join(record_line(member, held[member])) in record
    manifest = json.loads(held["demo/own/manifest.json"])
    code = held["demo/own/sm_90a.cubin"]
    assert manifest == {
        "schema": 1,
        "sources": {
            path: hashlib.sha256(data).hexdigest()
            for path, data in SOURCES.items()
            if path.startswith("csrc/") and data is not None
        },
        "compiler": "13.0.1",
        "flags": list(cubins.FLAGS),
        "cubins": [
            {
                "architecture": arch,
                "file": f"sm_{arch}.cubin",
                "sha256": hashlib.sha256(held[f"demo/own/sm_{arch}.cubin"]).hexdigest(),
                "size": len(code) + len(arch) - len("90a"),
                "kernels": [
                    {"name": "first", "registers": 80, "shared": 1024, "local": 0, "spills": 0},
                    {"name": "second", "registers": 40, "shared": 0, "local": 0, "spills": 0},
                ],
            }
            for arch in ("90a", "121a")
        ],
    }
    files = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in held.items()
        if name.startswith("demo/own/")
    }
    assert len(files) == 3
    assert kernels(receipt)["outputs"] == {"files": files}
    assert kernels(receipt)["inputs"]["code"] == code_of("sparkforge.build.stages.kernels")
    (wheel,) = (item for item in receipt["items"] if item["stage"] == "wheels")
    assert wheel["outputs"]["kernels"] == files
    assert set(files) <= set(wheel["outputs"]["added"])
    assert wheel["outputs"]["left_out"] == ["csrc/own/all.cu", "csrc/own/more.cuh"]
    assert wheel["outputs"]["compile_only"] == []
    dist = own.root / "dist" / "tiny"
    (bill,) = (
        part
        for part in json.loads((dist / "sbom.cdx.json").read_text())["components"]
        if part["name"] == "demo"
    )
    said = {one["name"]: one["value"] for one in bill["properties"]}
    for name, sha256 in files.items():
        assert said[f"sparkforge:kernels:{name}"] == f"compiled {sha256}"
    provenance = json.loads((dist / "provenance.intoto.json").read_text())["predicate"]
    definition = provenance["buildDefinition"]
    assert "kernels demo" in definition["internalParameters"]
    named = {one["name"] for one in definition["resolvedDependencies"]}
    assert "requirements/kernels.txt" in named


def test_it_ends_behind_the_stage(own: Project) -> None:
    receipt = own.build(until="kernels")
    assert receipt["items"][-1]["label"] == "kernels demo"
    assert not list((own.root / "dist" / "tiny").glob("*.whl"))


def test_kernels_are_compiled_again_when_a_source_changes_and_not_otherwise(own: Project) -> None:
    first = own.build()
    again = own.build("--offline")
    assert again["run"]["items"]["kernels demo"]["state"] == "in the store"
    own.patch({**SOURCES, "demo/mod.py": PATCHED + b"more = 1\n"})
    other = own.build("--offline")
    assert kernels(other)["key"] == kernels(first)["key"]
    assert other["run"]["items"]["kernels demo"]["state"] == "in the store"
    own.patch({**SOURCES, "csrc/own/more.cuh": b"// less\n"})
    out, _ = own.run("explain", "--target", "tiny")
    assert "sources.csrc/own/more.cuh: " in out
    changed = own.build("--offline")
    assert kernels(changed)["key"] != kernels(first)["key"]
    own.patch({"demo/mod.py": PATCHED})
    assert {item["stage"] for item in own.build()["items"]} == {"sources", "series", "wheels"}
    assert not [name for name in members(own.wheel) if name.startswith("demo/own/")]


def test_a_plan_counts_the_compiler_once(own: Project, wheels: Mapping[str, Path]) -> None:
    """The target's own wheels have its library, too."""
    (own.root / "requirements" / "tiny.txt").write_text((own.root / LOCK).read_text())
    lines = {
        f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.stat().st_size}  {wheel.name}\n"
        for wheel in wheels.values()
    }
    (own.root / "requirements" / "sizes.txt").write_text("".join(sorted(lines)))
    out, _ = own.run("--target", "tiny", "--until", "wheelhouse", "--dry-run", "--json")
    found = {step["label"]: step for step in json.loads(out)["plan"]}
    assert found["kernels demo"]["download"] == sum(
        wheel.stat().st_size for wheel in wheels.values()
    )
    assert (found["wheelhouse"]["download"], found["wheelhouse"]["unknown"]) == (0, [])


def test_a_target_without_a_gpu_gets_none(own: Project) -> None:
    own.edit_pins('    cuda_arch: "12.1"\n', "")
    assert {item["stage"] for item in own.build()["items"]} == {"sources", "series", "wheels"}


def test_damaged_machine_code_is_compiled_again(own: Project) -> None:
    receipt = own.build()
    (code,) = (own.store / "artefacts" / "kernels").glob("*/sm_90a.cubin")
    code.chmod(0o644)
    code.write_bytes(b"damaged")
    own.wheel.unlink()
    shutil.rmtree(own.store / "artefacts" / "wheels")
    out, _ = own.run("build", "--target", "tiny", "--engine", "none", "--until", "wheels")
    assert "kernels demo: missing, damaged or outdated in the store" in out
    held = members(own.wheel)["demo/own/sm_90a.cubin"]
    assert hashlib.sha256(held).hexdigest() in kernels(receipt)["outputs"]["files"].values()


def test_two_builds_agree(own: Project) -> None:
    own.build()
    out, _ = own.run("verify", "--target", "tiny", "--until", "wheels")
    assert "the same: demo-1.0+spark.3-py3-none-any.whl" in out
    assert "kernels demo" in out.partition("second build")[2]


def test_an_image_is_compared_with_the_sources_of_its_kernels(own: Project) -> None:
    baked = bake(own)
    out, _ = baked.verify()
    assert "it matches this checkout" in out
    note = baked.files["opt/sparkforge/share/inputs.json"]
    baked.files["opt/sparkforge/share/inputs.json"] = note.replace(b'"90a",', b"", 1)
    assert "inputs.json: kernels demo: its key differs" in baked.refused()
    baked.files["opt/sparkforge/share/inputs.json"] = note
    code = f"{SITE}/demo/own/sm_90a.cubin"
    kept, baked.files[code] = baked.files[code], b"other"
    assert f"{code}: differs from demo-1.0+spark.3.dist-info/RECORD" in baked.refused()
    baked.files[code] = kept
    own.patch({**SOURCES, "csrc/own/all.cu": SOURCE + b"// more\n"})
    said = baked.refused()
    assert "kernels demo: sources.csrc/own/all.cu: " in said
    assert "wheel demo: kernels" not in said


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            SOURCE + b"error name it\nerror and again\n",
            "csrc/own/all.cu:3: name it (sm_90a, and 1 more errors)\n"
            "  hint: fix it in change-a-line-of-the-module.patch",
        ),
        (
            b"fatal\n",
            "csrc/own/all.cu: sm_90a cannot be compiled:\n  |     ptxas fatal : out of luck",
        ),
        (b"// nothing\n", "csrc/own/all.cu: no kernel is in it"),
        (SOURCE + b"kernel third 1 0 0 0 sm_90a\n", "sm_121a has no third, which others have"),
        (
            SOURCE + b"kernel third 1 0 8 16\n",
            "\n  |   sm_90a third: 16 B, 8 B of stack\n  |   sm_121a third",
        ),
        (
            SOURCE + b"kernel third 1 0 8 0\n",
            "\n  |   sm_90a third: 0 B, 8 B of stack\n  |   sm_121a third",
        ),
    ],
)
def test_what_cannot_be_shipped_is_one_error(own: Project, source: bytes, words: str) -> None:
    own.patch({**SOURCES, "csrc/own/all.cu": source})
    _, err = own.run("build", "--target", "tiny", "--until", "kernels", code=CompileError.exit_code)
    assert words in err


def test_kernels_that_spill_are_listed(project: Project, wheels: Mapping[str, Path]) -> None:
    with_kernels(project, wheels, spills="third")
    project.patch({**SOURCES, "csrc/own/all.cu": SOURCE + b"kernel third 1 0 8 16 \n"})
    manifest = project.build() and json.loads(members(project.wheel)["demo/own/manifest.json"])
    third = {"name": "third", "registers": 1, "shared": 0, "local": 8, "spills": 16}
    assert manifest["cubins"][1]["kernels"][2] == third
    project.patch(SOURCES)
    _, err = project.run(
        "build", "--target", "tiny", "--until", "kernels", code=CompileError.exit_code
    )
    assert "third does not spill, but kernels.spills lists it" in err


def test_a_place_that_the_wheel_has_already_is_refused(own: Project) -> None:
    own.patch({**SOURCES, "demo/own/manifest.json": b"{}\n"})
    _, err = own.run("build", "--target", "tiny", "--until", "wheels", code=WheelError.exit_code)
    assert "demo/own/manifest.json is there already" in err


@pytest.mark.parametrize("everything", [False, True])
def test_a_compiled_wheel_gets_the_same_files(own: Project, everything: bool) -> None:
    receipt = own.build()
    outputs = {item["label"]: item["outputs"] for item in receipt["items"]}
    series, code = outputs["series demo"], outputs["wheel demo"]["kernels"]
    more = {name: data for name, data in members(own.wheel).items() if name in code}
    assert len(more) == 3
    upstream = pins.load(own.root / "pins.yaml").upstream("demo")
    repo = Store(own.store).git_path("demo")
    source = Source("demo", "release", repo, series["source"], "", "test")
    patched = Patched(source, series["commit"], series["tree"], series["touched"])
    place = own.root.parent
    release = make_wheel(place / "old", files={**PACKAGE, "demo/a.so": b"\x7fELF a"})
    made = make_wheel(place / "new", files={**PACKAGE, "demo/mod.py": PATCHED})
    request = overlay.Request(release, None, "spark.3", (), None, EPOCH)
    place = place / "out"
    place.mkdir()
    plan = upstream.compile.model_copy(update={"from_release": ("demo/a.so",)})
    upstream = upstream.model_copy(update={"compile": plan})
    recipe = Recipe(upstream, Decision(everything), None, EPOCH, {}, 1)
    done = assemble(request, recipe, Made(made, {}), patched, [], place, more)
    held = members(done.wheel.path)
    assert {name: held[name] for name in more} == more
    assert held["demo/mod.py"] == PATCHED
    assert set(more) <= set(done.wheel.added)
    assert done.differs == ()
    record = held["demo-1.0+spark.3.dist-info/RECORD"].decode().splitlines()
    assert {",".join(record_line(name, data)) for name, data in more.items()} <= set(record)
    with pytest.raises(WheelError, match=r"demo/a\.so is there already"):
        assemble(request, recipe, Made(made, {}), patched, [], place, {"demo/a.so": b""})


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


def pinned() -> Kernels:
    found = pins.load(ROOT / "pins.yaml").upstream("vllm").kernels
    assert found is not None
    return found


VLLM = pinned()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiler that pins.yaml names, from the package index of this machine."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "wheels").mkdir()
    wanted = wheelhouse.Wanted(ROOT / VLLM.requirements, (), "3.11", PLATFORM, None)
    wheelhouse.fill(
        Store(folder / "store"),
        wanted,
        Index(),
        interpreter.uv_program(),
        offline=False,
        into=folder / "wheels",
    )
    cubins.unpack(folder / "wheels", folder / "toolchain")
    return folder / "toolchain"


def compiled(folder: Path, toolchain: Path, source: str, *architectures: str) -> dict[str, bytes]:
    place = folder / "tree" / "csrc" / "own"
    place.mkdir(parents=True)
    (place / "all.cu").write_text(source)
    (place / "add.cuh").write_text(ADD)
    (folder / "out").mkdir()
    request = cubins.Request(folder / "tree", "csrc/own/all.cu", architectures, (), "13", {})
    made = cubins.build(request, toolchain, folder / "out")
    held = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    assert made == {name: hashlib.sha256(data).hexdigest() for name, data in held.items()}
    return held


def test_the_real_compiler_needs_no_other_and_repeats(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CPATH", "/nonexistent")
    first = compiled(tmp_path / "a", real, REAL, *VLLM.architectures)
    shutil.copytree(real, tmp_path / "another toolchain")
    second = compiled(
        tmp_path / "deep" / "er", tmp_path / "another toolchain", REAL, *VLLM.architectures
    )
    assert first == second
    assert set(first) == {
        "manifest.json",
        *(f"sm_{arch}.cubin" for arch in VLLM.architectures),
    }
    for arch in VLLM.architectures:
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


def test_the_real_compiler_names_source_and_line(real: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match=r"^csrc/own/all\.cu:6: identifier \"less\" is undefined"
    ):
        compiled(tmp_path, real, REAL.replace("add(__", "less(__"), "121a")
    wrong = REAL.replace('"add.cuh"', '"absent.cuh"')
    with pytest.raises(CompileError, match=r"^csrc/own/all\.cu:2: cannot open source file"):
        compiled(tmp_path / "b", real, wrong, "121a")


def test_the_real_compiler_tells_of_local_memory(real: Path, tmp_path: Path) -> None:
    body = "float kept[64]; for (int i = 0; i < 64; i++) kept[at[i] & 63] = x[i];"
    slow = (
        'extern "C" __global__ void slow(float* x, int* at) {'
        f" {body} for (int i = 0; i < 64; i++) x[i] = kept[at[i + 64] & 63]; }}\n"
    )
    with pytest.raises(CompileError, match=r"sm_121a slow: 0 B, 256 B of stack"):
        compiled(tmp_path, real, slow, "121a")


def test_an_architecture_that_the_compiler_lacks_is_named(real: Path, tmp_path: Path) -> None:
    with pytest.raises((CompileError, CommandError), match="sm_999a"):
        compiled(tmp_path, real, REAL, "999a")


def test_only_what_compiles_is_unpacked(real: Path) -> None:
    names = sorted(path.name for path in (real / "nvidia" / "cu13" / "lib").iterdir())
    assert names == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]
