"""The CUTLASS MoE module of FlashInfer for SM12x: what it is generated from and what it launches.

The dispatch is the real one, compiled for this machine; only the kernels are missing, which
`build.py proofs` compiles and disassembles. Nothing here, and nothing there, was run on SM12x.
"""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.run import call
from tests.patches.moe_dispatch import (
    TIMEOUT_S,
    Gemm,
    ask,
    build_probe,
    compile_host,
    gemms,
    generate,
    instantiations,
    kernels_of,
)
from tests.patches.mx_reference import scale_offset

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")

# what the patch means to add: every MXFP8 x MXFP8 GEMM of SM12x
WANTED = Counter(
    Gemm("fp8xfp8", (128, columns, 128), out, fusion, mx=True, swap_ab=swap)
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
    assert kernels_of(stock, "gemm_grouped/120") <= kernels_of(patched, "gemm_grouped/120")
    hopper = generate(trees["stock"], tmp_path / "stock-90", "90")
    assert folders(hopper)["gemm/90"] == 48
    assert generate(trees["patched"], tmp_path / "patched-90", "90") == hopper


def test_mxfp8_kernels_are_generated(trees: dict[str, Path], tmp_path: Path) -> None:
    stock = generate(trees["stock"], tmp_path / "stock", "120")
    patched = generate(trees["patched"], tmp_path / "patched", "120")
    assert gemms(stock, "fp8xfp8") == Counter()
    assert gemms(patched, "fp8xfp8") == WANTED
    # in files of their own: the others, with FP4 weights, are what they were
    own = {name: text for name, text in patched.items() if gemms({name: text}, "fp8xfp8")}
    others = {name: text for name, text in patched.items() if name not in own}
    assert instantiations(own).total() == WANTED.total()
    assert kernels_of(others, "gemm_grouped/120") == kernels_of(stock, "gemm_grouped/120")
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


# -- what it dispatches ------------------------------------------------------------------------

BLOCK_SCALED = {"mxfp8": "fp8xfp8", "mxfp8xmxfp4": "fp8xfp4", "nvfp4": "fp4xfp4"}
OUT = {"bf16": "BF16", "f16": "F16"}


def test_the_release_can_be_asked_for_the_kernels(
    flashinfer_answers: dict[str, dict[str, Any]],
) -> None:
    stock, patched = (flashinfer_answers[name]["mxfp8_moe"] for name in ("stock", "patched"))
    assert stock["CutlassMxfp8Config"] == [100, 103, 107]
    assert patched["CutlassMxfp8Config"] == [100, 103, 107, 120, 121]
    # the runner that the unified API chooses by it, and nobody else
    assert patched["CutlassMxfp8Runner"] == patched["CutlassMxfp8Config"]
    own = dict.fromkeys(("CutlassMxfp8Config", "CutlassMxfp8Runner"))
    assert patched | own == stock | own


@needs_nvcc
def test_every_tactic_launches_its_kernel(trees: dict[str, Path], tmp_path: Path) -> None:
    files = generate(trees["patched"], tmp_path / "generated", "120")
    program = build_probe(trees["patched"], tmp_path / "probe")
    runners, tactics = found = ask(program, 121)
    for name, types in BLOCK_SCALED.items():
        for suffix, out in OUT.items():
            mine = runners[f"{name}-{suffix}"]
            generated = Counter({g: n for g, n in gemms(files, types).items() if g.out == out})
            # nothing is offered twice, refused or launched that is not generated
            assert mine.tma_ws
            assert mine.gemms() == generated
            assert len(mine.launches) == generated.total()
            assert mine.dropped == ()
    for suffix in OUT:
        # CutlassMoeFCRunner takes these out of an MX runner's tactics; taken in spite of that,
        # they end in an error and not in the kernels that know no block scales
        assert set(runners[f"mxfp8-{suffix}"].others) == {"refused"}
        # per-tensor FP8 has its own
        assert set(runners[f"fp8-{suffix}"].others) == {"Sm89 per-tensor"}
    assert ask(program, 120) == found
    # types that are left out
    without = {name for name, count in tactics.items() if not count}
    assert without == {"fp8_uint4", "bf16_fp4", "fp16_fp4"}


@needs_nvcc
def test_scales_lie_where_cutlass_and_flashinfer_put_them(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    """The reference of the MXFP8 experts, and of the decode kernels' row-major ones, says where."""
    probe = tmp_path / "probe"
    source = Path(__file__).with_name("probes") / "probe_scale_layout.cu"
    compile_host(trees["patched"], source, probe, link=True)
    for rows, columns in ((128, 4), (257, 9)):
        done = call(probe, str(rows), str(columns), timeout=TIMEOUT_S)
        said = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        assert said == [
            [row, column, *[scale_offset(row, column, columns)] * 3]
            for row, column in itertools.product(range(rows), range(columns))
        ]
