"""The list of proofs, as data.

A unit is the source of one translation unit, and requirements for its machine code. `--ci` uses the
architectures in ``ci``, otherwise all are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkforge.core.errors import UsageError
from tools.proofs.checks import Promise

BOTH = ("121a", "120f")
_KERNELS = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels"
_LAUNCHER = "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"

# Operands in the machine code's order, which swap_ab reverses.
MXFP8_MXFP8 = r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8"
MXFP8_MXFP4 = r"QMMA\.SF\.16832\.F32\.(E4M3\.E2M1|E2M1\.E4M3)\.E8"
FP8_FP8 = r"QMMA\.16832\.F32\.E4M3\.E4M3"
NVFP4_NVFP4 = r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X"


@dataclass(frozen=True)
class Unit:
    """One proof.

    Attributes:
        name: unique, for the command line.
        summary: of the proof.
        archs: nvcc's targets, without ``sm_``.
        ci: architectures for `--ci`.
        promise: requirements for the machine code.
        text: the source, or
        file: its path in FlashInfer's tree (without ``tree``: in ``include/``), or
        generated: operand types of a file by FlashInfer's generator, in its notation.
        tree: needs FlashInfer's patched tree, for its headers.
        stage: machine code of the build's stage ``kernels``; ``decode`` checks it.
        control: must fail, which shows that the checks find failures.
    """

    name: str
    summary: str
    archs: tuple[str, ...]
    promise: Promise
    ci: tuple[str, ...] = ()
    text: str | None = None
    file: str | None = None
    generated: tuple[str, str] | None = None
    tree: bool = True
    stage: bool = False
    control: bool = False


def _instantiate(*lines: str) -> str:
    body = "\n".join(f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM({line});" for line in lines)
    return (
        f'#include "{_LAUNCHER}"\n'
        "namespace tensorrt_llm { namespace kernels { namespace cutlass_kernels_oss {\n"
        f"{body}\n}}}}}}\n"
    )


def _moe(act: str, weight: str, fusion: str, m: int, n: int, swap_ab: bool) -> str:
    """Return FlashInfer's generator's arguments of one grouped GEMM of the MoE."""
    return (
        f"Sm120, {act}, {weight}, __nv_bfloat16, void, EpilogueOpDefault, {fusion},"
        f" {m}, {n}, 128, 1, 1, 1, true, false, false, {str(swap_ab).lower()}"
    )


_E4M3, _E2M1 = "__nv_fp8_e4m3", "SafeFP4"
# the smallest tile in both orientations, and the largest with the other epilogue: they differ most
_CORNERS = (("NONE", 128, 32, True), ("NONE", 128, 32, False), ("FINALIZE", 128, 128, False))


def _corners(act: str, weight: str) -> str:
    return _instantiate(*(_moe(act, weight, *corner) for corner in _CORNERS))


TINY = Unit(
    "block-scaled-mma",
    "one block-scaled MXFP8 product, without a library",
    BOTH,
    Promise(MXFP8_MXFP8, kernels=1),
    ci=BOTH,
    file="block_scaled.cu",
    tree=False,
)
CORNERS = Unit(
    "moe-mxfp8-mxfp4-corners",
    "FlashInfer's MoE, MXFP8 activations × MXFP4 weights (gpt-oss): smallest and largest tile",
    BOTH,
    Promise(MXFP8_MXFP4, kernels=3, stack=16, sized=True),
    ci=("121a",),
    text=_corners(_E4M3, _E2M1),
)

UNITS: tuple[Unit, ...] = (
    TINY,
    replace(
        TINY,
        name="block-scaled-mma-plain",
        control=True,
        archs=("121", "120"),
        ci=("121", "120"),
        summary="control: targets without the instruction compile to an empty stub",
    ),
    CORNERS,
    Unit(
        "moe-plain",
        "control: so do CUTLASS's kernels, without a warning",
        ("121",),
        Promise(MXFP8_MXFP4, kernels=1, sized=True),
        control=True,
        text=_instantiate(_moe(_E4M3, _E2M1, "NONE", 128, 32, swap_ab=False)),
    ),
    Unit(
        "decode-kernels",
        "every decode kernel of the plugin, as its wheel has them: registers, no spills",
        ("121a", "120a", "90a"),
        Promise(None),
        ci=("121a", "120a", "90a"),
        stage=True,
        tree=False,
    ),
    Unit(
        "moe-mxfp8-mxfp4",
        "FlashInfer's MoE, MXFP8 × MXFP4: every kernel of its module",
        BOTH,
        Promise(MXFP8_MXFP4, stack=16, sized=True),
        generated=(_E4M3, _E2M1),
    ),
    Unit(
        "moe-mxfp8-mxfp8-corners",
        "FlashInfer's MoE, MXFP8 activations × MXFP8 weights, which our series adds",
        BOTH,
        Promise(MXFP8_MXFP8, kernels=3, stack=16, sized=True),
        ci=("121a",),
        text=_corners(_E4M3, _E4M3),
    ),
    Unit(
        "moe-mxfp8-mxfp8",
        "the same, every kernel that FlashInfer's module holds",
        BOTH,
        Promise(MXFP8_MXFP8, stack=16, sized=True),
        generated=(_E4M3, _E4M3),
    ),
    Unit(
        "moe-nvfp4-nvfp4",
        "FlashInfer's MoE in NVFP4: what the series must not change",
        BOTH,
        Promise(NVFP4_NVFP4, stack=16, sized=True),
        generated=(_E2M1, _E2M1),
    ),
    Unit(
        "moe-fp8-fp8",
        "per-tensor FP8 keeps its route through SM89's instruction",
        BOTH,
        Promise(FP8_FP8, stack=None),
        file=f"{_KERNELS}/moe_gemm/moe_gemm_kernels_fp8_fp8.cu",
    ),
)


def choose(names: Sequence[str], *, ci: bool) -> list[Unit]:
    """Return the chosen units, each with its architectures; UsageError if a name is unknown."""
    known = {unit.name: unit for unit in UNITS}
    if missing := [name for name in names if name not in known]:
        raise UsageError(f"no such proof: {', '.join(missing)}", f"use one of {', '.join(known)}")
    chosen = [known[name] for name in names] if names else list(UNITS)
    if ci:
        chosen = [replace(unit, archs=unit.ci) for unit in chosen]
    return [unit for unit in chosen if unit.archs]
