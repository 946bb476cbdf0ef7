"""The list of proofs, as data, and the comparison of machine code with what a unit promises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkforge.check.machinecode import Kernel

BOTH = ("121a", "120f")
SHARED_LIMIT = 101_376
"""Limit for a block's shared memory on SM12x in bytes (99 KiB; CUDA's programming guide)."""
STUB = "it only traps: an empty stub"
# tcgen05 and tensor memory (UTC…MMA, UTCBAR, LDTM, STTM) and warpgroup MMA: no SM12x has them.
# It has TMA's loads and stores (UTMALDG, UTMASTG); ptxas refuses TMA's scatter for it.
_FORBIDDEN = re.compile(r"UTC\w*|LDTM|STTM|[HQI]GMMA|WARPGROUP")

# Operands in the machine code's order, which swap_ab reverses.
MXFP8_MXFP8 = r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8"
MXFP8_MXFP4 = r"QMMA\.SF\.16832\.F32\.(E4M3\.E2M1|E2M1\.E4M3)\.E8"
FP8_FP8 = r"QMMA\.16832\.F32\.E4M3\.E4M3"


@dataclass(frozen=True)
class Unit:
    """The source of one translation unit, and requirements for every kernel in it.

    Attributes:
        source: a file of FlashInfer's tree, or the text of one.
        mma: pattern that each matrix instruction must match completely; each kernel must have one.
        kernels: their number; None: at least one.
        stack: allowed spilled bytes per thread, as measured, to notice more. None: any, for
            unpatched kernels.
        archs: nvcc's targets, without ``sm_``.
        ci: those for `--ci`.
        tree: needs FlashInfer's patched tree, and states its dynamic shared memory; otherwise the
            source is in ``include/``.
        control: must fail as an empty stub, which shows that the checks find failures.
    """

    name: str
    summary: str
    source: str
    mma: str
    kernels: int | None
    stack: int | None = 0
    archs: tuple[str, ...] = BOTH
    ci: tuple[str, ...] = ()
    tree: bool = True
    control: bool = False


def _moe(act: str, weight: str, *tiles: tuple[str, int, int, bool]) -> str:
    """Return a source of grouped GEMMs of the MoE, in FlashInfer's generator's words."""
    launcher = "moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
    body = "\n".join(
        f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, {act}, {weight}, __nv_bfloat16, void,"
        f" EpilogueOpDefault, {fusion}, {m}, {n}, 128, 1, 1, 1, true, false, false,"
        f" {str(swap_ab).lower()});"
        for fusion, m, n, swap_ab in tiles
    )
    return (
        f'#include "tensorrt_llm/kernels/cutlass_kernels/{launcher}"\n'
        "namespace tensorrt_llm { namespace kernels { namespace cutlass_kernels_oss {\n"
        f"{body}\n}}}}}}\n"
    )


_E4M3, _E2M1 = "__nv_fp8_e4m3", "SafeFP4"
# the smallest tile in both orientations, and the largest with the other epilogue: they differ most
_CORNERS = (("NONE", 128, 32, True), ("NONE", 128, 32, False), ("FINALIZE", 128, 128, False))
_TINY = Unit(
    "block-scaled-mma",
    "one block-scaled MXFP8 product, without a library",
    "block_scaled.cu",
    MXFP8_MXFP8,
    kernels=1,
    ci=BOTH,
    tree=False,
)
UNITS: tuple[Unit, ...] = (
    _TINY,
    replace(
        _TINY,
        name="block-scaled-mma-plain",
        summary="control: targets without the instruction compile to an empty stub",
        archs=("121", "120"),
        ci=("121", "120"),
        control=True,
    ),
    Unit(
        "moe-mxfp8-mxfp4",
        "FlashInfer's MoE, MXFP8 activations × MXFP4 weights (gpt-oss): smallest and largest tile",
        _moe(_E4M3, _E2M1, *_CORNERS),
        MXFP8_MXFP4,
        kernels=3,
        stack=16,
        ci=("121a",),
    ),
    Unit(
        "moe-plain",
        "control: so do CUTLASS's kernels, without a warning",
        _moe(_E4M3, _E2M1, _CORNERS[1]),
        MXFP8_MXFP4,
        kernels=1,
        archs=("121",),
        control=True,
    ),
    Unit(
        "moe-mxfp8-mxfp8",
        "FlashInfer's MoE, MXFP8 activations × MXFP8 weights, which our series adds",
        _moe(_E4M3, _E4M3, *_CORNERS),
        MXFP8_MXFP8,
        kernels=3,
        stack=16,
        ci=("121a",),
    ),
    Unit(
        "moe-fp8-fp8",
        "per-tensor FP8 keeps its route through SM89's instruction",
        "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_kernels_fp8_fp8.cu",
        FP8_FP8,
        kernels=None,
        stack=None,
    ),
)


def problems(kernels: Sequence[Kernel], unit: Unit, arch: str) -> list[str]:
    """Return what is wrong with a unit's kernels for an architecture; none: a proof."""
    wrong = [f"{k.name[:60]}: {what}" for k in kernels for what in _problems(k, unit, arch)]
    if not kernels or unit.kernels not in (None, len(kernels)):
        wrong.append(f"has {len(kernels)} kernels, not {unit.kernels or 'one or more'}")
    return wrong


def passes(wrong: Sequence[str], unit: Unit) -> bool:
    """Return whether a unit passes; a control must be refused, and only as a stub."""
    return bool(wrong) and all(STUB in one for one in wrong) if unit.control else not wrong


def _problems(kernel: Kernel, unit: Unit, arch: str) -> list[str]:
    found = []
    # the machine code has no f: 120f is sm_120 there, like plain 120
    if kernel.target != f"sm_{arch.removesuffix('f')}":
        found.append(f"is for {kernel.target}, not sm_{arch}")
    if bad := [word for word in kernel.opcodes if _FORBIDDEN.fullmatch(word)]:
        found.append(f"uses {', '.join(bad)}, which no SM12x has")
    if not kernel.mma:
        found.append(f"has no matrix instruction{f': {STUB}' if kernel.traps else ''}")
    if other := [word for word in kernel.mma if not re.fullmatch(unit.mma, word)]:
        found.append(f"has {', '.join(other)}, not {unit.mma}")
    if unit.stack is not None and (kernel.stack > unit.stack or kernel.local):
        found.append(f"spills: {kernel.stack} B stack, {kernel.local} B local, not {unit.stack}")
    shared = kernel.shared + (kernel.shared_dynamic or 0)
    if shared > SHARED_LIMIT:
        found.append(f"needs {shared} B of shared memory; a block has {SHARED_LIMIT} at most")
    if unit.tree and kernel.shared_dynamic is None and kernel.mma:
        found.append("does not state its dynamic shared memory")
    return found
