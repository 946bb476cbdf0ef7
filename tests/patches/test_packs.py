"""The list of FlashInfer's modules for gpt-oss agrees with vLLM and FlashInfer, on a CPU."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import cached
from sparkforge.build.context import Context
from sparkforge.build.packs import modules, recipe
from sparkforge.build.packs.modules import LOCK
from sparkforge.build.packs.pack import packs_item
from sparkforge.build.results import PackResult
from sparkforge.build.stages.wheels import tree_of
from sparkforge.core.run import call
from sparkforge.sources.wheelhouse import in_store, read_lock
from sparkforge.store.store import Artefact
from tests.modules import SMALLEST
from tests.patches.checkout import CHECKOUT, ROOT, store
from tests.patches.checkout import context as context_in
from tests.patches.probing import ask
from tests.patches.trees import tree

Loaded = dict[str, list[str]]


@pytest.fixture(scope="module")
def loaded(
    stock_python: Path, trees: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Loaded]:
    """Modules that the release and the series load, by tree and compute capability."""
    folder = tmp_path_factory.mktemp("packs")
    found = {}
    for kind, version in (("stock", "12.1"), ("patched", "12.1"), ("patched", "12.0")):
        variables = {
            "PYTHONPATH": f"{trees[kind]}{os.pathsep}{ROOT}",
            "FLASHINFER_WORKSPACE_BASE": str(folder / "workspace"),
        }
        found[kind, version] = ask(
            stock_python, "probe_packs", version, folder=folder, variables=variables
        )
    return found


def needed(option: str) -> list[str]:
    return sorted(one.name for one in modules.MODULES if one.needs == option)


@pytest.mark.parametrize("version", ["12.0", "12.1"])
def test_the_list_has_what_flashinfer_loads(
    loaded: dict[tuple[str, str], Loaded], version: str
) -> None:
    here = loaded["patched", version]
    options = {one.needs for one in modules.MODULES}
    assert {option: here[option] for option in options} == {
        option: needed(option) for option in options
    }


def test_each_sink_module_has_its_own_name(loaded: dict[tuple[str, str], Loaded]) -> None:
    def names(kind: str, start: str) -> set[str]:
        return {name for name in loaded[kind, "12.1"][start] if "attention_sink" in name}

    def every(kind: str) -> list[set[str]]:
        starts = ("", "--kv-cache-dtype fp8", "prefill, head size 128")
        return [names(kind, start) for start in starts]

    bf16, fp8, other = every("stock")
    assert bf16 == fp8  # two modules, one name
    assert other < bf16
    bf16, fp8, other = every("patched")
    assert len(bf16 | fp8 | other) == len(bf16) + len(fp8) + len(other) == 5


def test_the_stand_in_for_torch_changes_nothing(
    stock_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("described")
    patched = tree("flashinfer", folder / "tree", patched=True).resolve()
    ours = recipe.describe(patched, "12.1f", modules.MODULES)
    code = "import sys; from pathlib import Path; sys.path.append(sys.argv[1]); import describe;"
    code += "describe.main(*map(Path, sys.argv[2:]))"
    given = (Path(recipe.__file__).parent, patched, patched / "request.json")
    out = call(stock_python, "-I", "-c", code, *given).stdout
    theirs = json.loads(out.splitlines()[-1])
    assert [
        {"name": one.name, "units": [(unit.source, list(unit.flags)) for unit in one.units]}
        for one in ours
    ] == [
        {"name": one["name"], "units": [(unit["source"], unit["flags"]) for unit in one["units"]]}
        for one in theirs
    ]
    # relative to the tree, and for the family alone
    words = [word for one in ours for unit in one.units for word in (unit.source, *unit.flags)]
    assert not [word for word in words if str(folder) in word]
    assert {word for word in words if "gencode" in word} == {
        "-gencode=arch=compute_121f,code=sm_121f"
    }


# -- a pack, from its sources to FlashInfer ----------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Context, Artefact[PackResult]]:
    """A pack of one small module for the rtx target, compiled now, in a store of its own."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    context = in_new_store(tmp_path_factory.mktemp("packs"))
    return context, pack(context)


def in_new_store(folder: Path) -> Context:
    return context_in("rtx", store=store().borrowed(folder / "store"))


def pack(context: Context) -> Artefact[PackResult]:
    item = packs_item(context, tree_of(context, "flashinfer"), [SMALLEST])
    cached.run(context, cached.ordered([item]))
    return item.artefact


def test_flashinfer_loads_a_pack_and_compiles_nothing(
    packed: tuple[Context, Artefact[PackResult]],
    stock_python: Path,
    trees: dict[str, Path],
    tmp_path: Path,
) -> None:
    context, made = packed
    site = tmp_path / "site"
    with zipfile.ZipFile(made.path / made.result.file) as wheel:
        assert wheel.testzip() is None
        wheel.extractall(site)
    # what a machine with a GPU has: CUDA's run time, from its wheel, and a driver
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (runtime,) = (one for one in read_lock(CHECKOUT / LOCK) if one.name == "nvidia-cuda-runtime")
    found = in_store(context.store, runtime, "3.11", "linux/amd64")
    assert found is not None
    with zipfile.ZipFile(found[1]) as wheel:
        data = wheel.read("nvidia/cu13/lib/libcudart.so.13")
    (libraries / "libcudart.so.13").write_bytes(data)
    soname = "-Wl,-soname,libcuda.so.1"
    call("g++", "-shared", soname, "-xc++", "/dev/null", "-o", libraries / "libcuda.so.1")

    def loads(arch: str) -> Any:
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, (trees["patched"], ROOT, site))),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "workspace"),
            "FLASHINFER_CUDA_ARCH_LIST": arch,
            "FLASHINFER_DISABLE_JIT": "1",
            "LD_LIBRARY_PATH": str(libraries),
        }
        words = ("probe_flashinfer", "loads")
        return ask(stock_python, *words, folder=tmp_path, variables=variables)["loads"]

    # 12.1 is what FlashInfer reads of a GB10, as 12.1a; a pack for 12.0f serves it, too
    for arch in ("12.0", "12.1"):
        assert loads(arch) == {SMALLEST.name: "loaded", "sampling": "MissingJITCacheError"}
    assert loads("9.0") == dict.fromkeys((SMALLEST.name, "sampling"), "MissingJITCacheError")
    manifest = json.loads((site / "flashinfer_jit_cache" / "manifest.json").read_text())
    assert manifest["architecture"] == "sm120f"
    assert manifest["modules"][0]["sha256"] == made.result.modules[SMALLEST.name]
