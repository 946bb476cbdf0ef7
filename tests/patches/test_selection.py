"""What vLLM selects on CUDA devices, as released and with our patches and plugin, against tables in
golden/.

The tables hold every answer of the real selectors for capabilities 9.0, 10.0, 12.0 and 12.1, so
that each change of a selection, ours or a rebase's, shows in a diff. After a change that is meant:

    SPARKFORGE_UPDATE_GOLDEN=1 python -m pytest tests/patches/test_selection.py

The probe (probes/probe_selection.py) runs in the interpreters of the cpu target. What stands in for
the CUDA machine, and why that is sound: probes/fake_cuda.py.
"""

import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.patches.probes import fake_cuda
from tests.patches.probing import run_module
from tests.patches.trees import release_file

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
CAPABILITIES = ("9.0", "10.0", "12.0", "12.1")
SM12X = ("12.0", "12.1")

Tables = dict[str, dict[str, dict[str, list[str]]]]

GPT_OSS = "MXFP4 MoE, gpt-oss"
PLUGIN = "plugin, MXFP4 MoE, gpt-oss"


def _probe(python: Path, folder: Path) -> Tables:
    run_module(python, "probe_selection", folder, *CAPABILITIES, folder=folder)
    return {
        capability: json.loads((folder / f"{capability}.json").read_text(encoding="utf-8"))
        for capability in CAPABILITIES
    }


@pytest.fixture(scope="module")
def patched(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return _probe(patched_python, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def stock(stock_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return _probe(stock_python, tmp_path_factory.mktemp("stock"))


# -- the tables ----------------------------------------------------------------


def _check(tables: Tables, name: str) -> None:
    path = GOLDEN / name
    if os.environ.get("SPARKFORGE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    assert _flat(tables) == _flat(json.loads(path.read_text(encoding="utf-8")))


def _flat(tables: Tables) -> dict[str, list[str]]:
    """Return one entry an answer: pytest then shows the few that differ."""
    return {
        f"{capability} | {title} | {name}": lines
        for capability, by_title in tables.items()
        for title, table in by_title.items()
        for name, lines in table.items()
    }


def test_stock_selects_as_recorded(stock: Tables) -> None:
    _check(stock, "selection-unpatched.json")


def test_patched_selects_as_recorded(patched: Tables) -> None:
    _check(patched, "selection-patched.json")


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_other_devices_select_as_before(stock: Tables, patched: Tables, capability: str) -> None:
    """There the patches are meant to change what was refused, and nothing that was selected."""
    for title, table in stock[capability].items():
        for name, lines in table.items():
            refused = lines[0].startswith(("ValueError", "NotImplementedError"))
            # SM90 has XQA, too, and no longer asks for the artifactory.
            reachable = title == "attention with sinks, cubins out of reach"
            # Marlin pads less, on every device.
            expert = "MarlinExperts, 2880x2880 as"
            before = [line.replace(f"{expert} 3072x2944", f"{expert} 2880x2880") for line in lines]
            if not (refused or reachable or name.startswith("(")):
                assert patched[capability][title][name] == before, f"{title}: {name}"


# -- one test a patch, and one an option of the plugin ---------------------------


@pytest.mark.parametrize("capability", ["10.0", *SM12X])
def test_flashinfer_cutlass_falls_through(stock: Tables, patched: Tables, capability: str) -> None:
    (before,) = stock[capability][GPT_OSS]["flashinfer_cutlass"]
    assert before.startswith("ValueError: Mxfp4 MoE backend 'FLASHINFER_CUTLASS_MXFP4_BF16'")
    answer, warning = patched[capability][PLUGIN]["flashinfer_cutlass"]
    assert answer.startswith("FLASHINFER_CUTLASS_MXFP4_MXFP8: FewRowsCutlass")
    assert "quantizes them to MXFP8" in warning
    # Asked for outright it is nothing to warn of.
    asked = patched[capability][PLUGIN]["flashinfer_cutlass, moe.activation=mxfp8"]
    assert asked == [answer]
    # where BF16 can be had, it is kept
    (answer,) = patched["9.0"][PLUGIN]["flashinfer_cutlass"]
    assert answer.startswith("FLASHINFER_CUTLASS_MXFP4_BF16")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_experts_are_not_expanded_to_bf16_on_a_gpu(patched: Tables, capability: str) -> None:
    table = patched[capability][PLUGIN]
    (answer,) = table["(experts: bf16_dequant)"]
    assert answer.startswith("ValueError: ")
    assert "available on CPU only" in answer
    assert table["(hint at bf16_dequant)"] == ["None"]


@pytest.mark.parametrize("capability", SM12X)
def test_mxfp8_experts_take_flashinfer_by_name_where_it_has_the_kernels(
    stock: Tables, patched: Tables, capability: str
) -> None:
    title = "MXFP8 MoE, SiLU"
    with_kernels = f"{title}, FlashInfer with kernels for SM12x"
    wanted = ["FLASHINFER_CUTLASS: FlashInferExperts"]
    assert patched[capability][with_kernels]["flashinfer_cutlass"] == wanted
    # The automatic choice is no kernel that never ran on such a device.
    assert stock[capability][with_kernels]["auto"] == ["MARLIN: MarlinExperts"]
    assert patched[capability][with_kernels]["auto"] == ["MARLIN: MarlinExperts"]
    # As released, FlashInfer has them for SM10x alone.
    assert "in the installed FlashInfer" in patched[capability][title]["flashinfer_cutlass"][0]


@pytest.mark.parametrize("capability", SM12X)
def test_sinks_need_nothing_from_the_artifactory(
    stock: Tables, patched: Tables, capability: str
) -> None:
    title = "attention with sinks, cubins out of reach"
    assert {lines[0] for lines in stock[capability][title].values()} == {"TritonAttentionBackend"}
    assert {lines[0] for lines in patched[capability][title].values()} == {"FlashInferBackend"}
    # There the kernels are cubins, so what cannot be had must not be selected.
    assert patched["10.0"][title] == stock["10.0"][title]
    assert "FlashInferBackend" not in {lines[0] for lines in patched["10.0"][title].values()}


# -- the stand-ins ---------------------------------------------------------------


def _missing(wheel: Path, prefix: str, packages: Mapping[str, Any]) -> list[str]:
    """Return what modules of a wheel neither define nor import, at whatever depth."""
    missing = []
    with zipfile.ZipFile(wheel) as archive:
        for package, wanted in packages.items():
            path = prefix + package.replace(".", "/")
            (found,) = {f"{path}.py", f"{path}/__init__.py"} & {*archive.namelist()}
            words = {*re.findall(r"\w+", archive.read(found).decode())}
            missing += [f"{package}.{name}" for name in wanted if name not in words]
    return missing


def test_stand_ins_have_nothing_that_the_wheels_lack() -> None:
    ours = {name: names for name, names in fake_cuda.PACKAGES.items() if "flashinfer" in name}
    # the class that vLLM asks for MXFP8 experts, too
    ours["flashinfer.fused_moe"] += ("CutlassMxfp8Config",)
    assert _missing(release_file("flashinfer", "wheel"), "", ours) == []
    wheel = release_file("vllm", "cuda-arm64")
    ours = {name: names for name, names in fake_cuda.PACKAGES.items() if "triton" in name}
    assert _missing(wheel, "vllm/third_party/", ours) == []
    # By this absence vLLM knows which triton_kernels it has.
    newer = {"triton_kernels.tensor": ("SparseMatrix",)}
    assert _missing(wheel, "vllm/third_party/", newer) == ["triton_kernels.tensor.SparseMatrix"]
