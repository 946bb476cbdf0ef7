"""The CUTLASS MoE module of FlashInfer for SM12x: what it is generated from and what it launches.

The dispatch is the real one, compiled for this machine; only the kernels are missing, which
`build.py proofs` compiles and disassembles. Nothing here, and nothing there, was run on SM12x.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.patches.moe_dispatch import Gemm, Runner, ask, build_probe, fp8_gemms, generate

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")

# what the patch means to add: every MXFP8 x MXFP8 GEMM of SM12x
WANTED = Counter(
    Gemm((128, columns, 128), out, fusion, mx=True, swap_ab=swap)
    for columns, out, fusion, swap in itertools.product(
        (32, 64, 128), ("F16", "BF16"), ("NONE", "FINALIZE"), (False, True)
    )
)


def folders(files: dict[str, str]) -> Counter[str]:
    return Counter(name.rpartition("/")[0] for name in files)


def test_hopper_files_only_for_hopper(trees: dict[str, Path], tmp_path: Path) -> None:
    stock = generate(trees["stock"], tmp_path / "stock", "120")
    patched = generate(trees["patched"], tmp_path / "patched", "120")
    assert folders(stock) == {"gemm/90": 48, "gemm_grouped/120": 11, "gemm_grouped/80": 9}
    assert "gemm/90" not in folders(patched)
    assert {name for name in stock if not name.startswith("gemm/90/")} <= set(patched)
    # the bodies of those 48 are for a macro that only Hopper's module defines
    launcher = next(iter(stock[name] for name in stock if name.startswith("gemm/90/")))
    inl = trees["stock"] / "csrc/nv_internal" / launcher.splitlines()[0].split('"')[1]
    assert "#ifdef COMPILE_HOPPER_TMA_GEMMS" in inl.read_text(encoding="utf-8")

    hopper = generate(trees["stock"], tmp_path / "stock-90", "90")
    assert folders(hopper)["gemm/90"] == 48
    assert generate(trees["patched"], tmp_path / "patched-90", "90") == hopper


def test_mxfp8_kernels_are_generated(trees: dict[str, Path], tmp_path: Path) -> None:
    stock = generate(trees["stock"], tmp_path / "stock", "120")
    patched = generate(trees["patched"], tmp_path / "patched", "120")
    assert fp8_gemms(stock) == Counter()
    assert fp8_gemms(patched) == WANTED
    # in files of their own: the others, with FP4 weights, are what they were
    added = set(patched) - set(stock)
    assert fp8_gemms({name: patched[name] for name in added}) == WANTED
    assert all(patched[name] == stock[name] for name in set(patched) - added)
    # no other module changes
    for arch in ("100", "103"):
        before, after = (
            {
                name: text
                for name, text in generate(path, tmp_path / f"{kind}-{arch}", arch).items()
                if not name.startswith("gemm/90/")
            }
            for kind, path in trees.items()
        )
        assert after == before


def test_the_release_can_be_asked_for_the_kernels(
    flashinfer_answers: dict[str, dict[str, Any]],
) -> None:
    stock, patched = (flashinfer_answers[name]["mxfp8_moe"] for name in ("stock", "patched"))
    assert stock["CutlassMxfp8Config"] == [100, 103, 107]
    assert patched["CutlassMxfp8Config"] == [100, 103, 107, 120, 121]
    # the runner that the unified API chooses by it, and nobody else
    assert patched["CutlassMxfp8Runner"] == patched["CutlassMxfp8Config"]
    assert {**patched, "CutlassMxfp8Config": 0, "CutlassMxfp8Runner": 0} == {
        **stock,
        "CutlassMxfp8Config": 0,
        "CutlassMxfp8Runner": 0,
    }


@pytest.fixture(scope="module")
def probes(
    trees: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, dict[str, Runner]]]:
    folder = tmp_path_factory.mktemp("probes")
    programs = {name: build_probe(path, folder / name) for name, path in trees.items()}
    return {
        name: {capability: ask(program, capability) for capability in (89, 90, 100, 120, 121)}
        for name, program in programs.items()
    }


@needs_nvcc
@pytest.mark.parametrize("capability", [120, 121])
def test_each_mxfp8_tactic_launches_its_kernel(
    probes: dict[str, dict[int, dict[str, Runner]]], capability: int
) -> None:
    mine = probes["patched"][capability]
    for name, out in (("mxfp8-bf16", "BF16"), ("mxfp8-f16", "F16")):
        assert mine[name].tma_ws
        # nothing is offered twice, refused or launched that is not generated
        wanted = Counter({gemm: n for gemm, n in WANTED.items() if gemm.out == out})
        assert mine[name].gemms() == wanted
        assert len(mine[name].launches) == wanted.total()
        # CutlassMoeFCRunner takes these out of an MX runner's tactics; taken in spite of that,
        # they end in an error and not in the kernels that know no block scales
        assert set(mine[name].others) == {"refused"}


@needs_nvcc
@pytest.mark.parametrize("capability", [120, 121])
def test_per_tensor_fp8_keeps_its_kernels(
    probes: dict[str, dict[int, dict[str, Runner]]], capability: int
) -> None:
    for name in ("fp8-bf16", "fp8-f16"):
        mine = probes["patched"][capability][name]
        assert mine == probes["stock"][capability][name]
        assert not mine.tma_ws
        assert set(mine.others) == {"Sm89 per-tensor"}


@needs_nvcc
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_other_devices_are_as_they_were(
    probes: dict[str, dict[int, dict[str, Runner]]], capability: int
) -> None:
    assert probes["patched"][capability] == probes["stock"][capability]


@needs_nvcc
def test_the_release_has_no_mxfp8_tactic_on_sm12x(
    probes: dict[str, dict[int, dict[str, Runner]]],
) -> None:
    """The control: why the runner's constructor raises there."""
    stock = probes["stock"][121]["mxfp8-bf16"]
    assert not stock.tma_ws
    assert stock.launches == ()
    assert set(stock.others) == {"Sm89 per-tensor"}  # block scales would be ignored
