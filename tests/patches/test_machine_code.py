"""Kernels of FlashInfer's patched MoE, compiled and disassembled: nothing runs, we have no GB10.

nvcc takes 6 to 9 GB and minutes for each. The machine code of whole wheels is read by
`build.py proofs`. ``cuda/sparkforge_shared_bytes.h`` writes CUTLASS's dynamic shared memory, which
is in no cubin, into the kernel's name; the instructions stay the same.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparkforge.build.context import Context
from sparkforge.check import machinecode
from sparkforge.check.machinecode import Kernel
from sparkforge.core.run import call
from tests.patches.moe_dispatch import INCLUDES, TIMEOUT_S
from tests.support import ROOT

CUDA = Path(__file__).with_name("cuda")
CUBLAS = ROOT / "sparkforge/build/packs/include"
SHARED_LIMIT = 101_376
"""Limit for a block's shared memory on SM12x in bytes (99 KiB; CUDA's programming guide)."""
# tcgen05 and tensor memory (UTC…MMA, UTCBAR, LDTM, STTM) and warpgroup MMA: no SM12x has them.
# It has TMA's loads and stores (UTMALDG, UTMASTG); ptxas refuses TMA's scatter for it.
FORBIDDEN = re.compile(r"UTC\w*|LDTM|STTM|[HQI]GMMA|WARPGROUP")
# bytes of shared memory at the launch: the second template argument, sparkforge_shared_bytes.h
DYNAMIC = re.compile(r"sparkforge_device_kernel.*?Li(\d+)EEEv")
# As FlashInfer 0.7.0.post1 compiles its fused MoE for SM12x (jit/cpp_ext.py, jit/fused_moe.py).
# Without flags of a host object, since the result is a cubin.
FLAGS = (
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-use_fast_math",
    "-DNDEBUG",
    "-O3",
    *(
        f"-DFLASHINFER_ENABLE_{kind}"
        for kind in ("FP8_E8M0", "FP4_E2M1", "F16", "BF16", "FP8_E4M3", "FP8_E5M2")
    ),
    "-DCOMPILE_BLACKWELL_TMA_GEMMS",
    "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS",
    *("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4"),
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
    "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
    *("-include", "sparkforge_shared_bytes.h"),
)
E4M3, E2M1 = "__nv_fp8_e4m3", "SafeFP4"
# the smallest tile in both orientations, and the largest with the other epilogue: they differ most
TILES = (("NONE", 128, 32, True), ("NONE", 128, 32, False), ("FINALIZE", 128, 128, False))
# Operands in the machine code's order, which swap_ab reverses.
MXFP8 = r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8"
MXFP4 = r"QMMA\.SF\.16832\.F32\.(E4M3\.E2M1|E2M1\.E4M3)\.E8"

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")


def moe(weight: str) -> str:
    """Return a source of grouped GEMMs with MXFP8 activations, in the words of FlashInfer."""
    body = "\n".join(
        f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, {E4M3}, {weight}, __nv_bfloat16, void,"
        f" EpilogueOpDefault, {fusion}, {m}, {n}, 128, 1, 1, 1, true, false, false,"
        f" {str(swap_ab).lower()});"
        for fusion, m, n, swap_ab in TILES
    )
    return (
        '#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/'
        'moe_gemm_tma_ws_launcher.inl"\n'
        "namespace tensorrt_llm { namespace kernels { namespace cutlass_kernels_oss {\n"
        f"{body}\n}}}}}}\n"
    )


@dataclass(frozen=True)
class Compiler:
    """nvcc, and what reads its cubins."""

    readers: machinecode.Readers
    folder: Path

    def kernels(self, source: Path, arch: str, *words: str | Path) -> list[Kernel]:
        """Compile a source for an architecture, without host code, and read it."""
        cubin = self.folder / f"{source.stem}-{arch}.cubin"
        out = ("-cubin", source, "-o", cubin)
        call("nvcc", "-std=c++17", *words, f"-arch=sm_{arch}", *out, timeout=TIMEOUT_S)
        return self.readers.read(cubin)


@pytest.fixture(scope="module")
def compiler(cpu_context: Context, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(machinecode.readers(cpu_context), tmp_path_factory.mktemp("cubins"))


def check(kernel: Kernel, arch: str, mma: str, stack: int = 0) -> None:
    """Fail unless a kernel has only the promised matrix instruction, and fits SM12x."""
    # the machine code has no f: 120f is sm_120 there, like plain 120
    assert kernel.target == f"sm_{arch.removesuffix('f')}"
    assert kernel.mma and all(re.fullmatch(mma, word) for word in kernel.mma), kernel
    assert not [word for word in kernel.opcodes if FORBIDDEN.fullmatch(word)], kernel
    assert kernel.stack <= stack and kernel.local == 0, kernel
    dynamic = DYNAMIC.search(kernel.name)
    assert kernel.shared + int(dynamic[1] if dynamic else 0) <= SHARED_LIMIT, kernel


@pytest.mark.parametrize("arch", ["121a", "120f"])
def test_block_scaled_product_is_one_instruction(compiler: Compiler, arch: str) -> None:
    (kernel,) = compiler.kernels(CUDA / "block_scaled.cu", arch)
    check(kernel, arch, MXFP8)


@pytest.mark.parametrize("arch", ["121", "120"])
def test_plain_architecture_gives_an_empty_stub(compiler: Compiler, arch: str) -> None:
    """The control: without a warning."""
    (kernel,) = compiler.kernels(CUDA / "block_scaled.cu", arch)
    assert (kernel.mma, kernel.traps) == ({}, True)


@pytest.mark.parametrize(("weight", "mma"), [(E2M1, MXFP4), (E4M3, MXFP8)])
def test_moe_has_block_scaled_instructions(
    compiler: Compiler, trees: dict[str, Path], tmp_path: Path, weight: str, mma: str
) -> None:
    """Of gpt-oss (MXFP4 weights), and what our series adds (MXFP8 weights)."""
    source = tmp_path / f"moe{weight}.cu"
    source.write_text(moe(weight))
    words: list[str | Path] = [*FLAGS]
    for include in (CUDA, CUBLAS, *(trees["patched"] / name for name in INCLUDES)):
        words += ["-isystem", include]
    kernels = compiler.kernels(source, "121a", *words)
    assert len(kernels) == len(TILES)
    for kernel in kernels:
        check(kernel, "121a", mma, stack=16)
        assert DYNAMIC.search(kernel.name)
