"""Kernels of FlashInfer's patched MoE, compiled and disassembled: nothing runs, we have no GB10.

nvcc takes 6 to 9 GB and minutes. The machine code of whole wheels is read by
`build.py proofs`. ``cuda/sparkforge_shared_bytes.h`` writes CUTLASS's dynamic shared memory, which
is in no cubin, into the kernel's name; the instructions stay the same.
"""

import re
import shutil
from pathlib import Path

import pytest

from sparkforge.build.context import Context
from sparkforge.check.proofs import Readers
from sparkforge.core.run import call
from tests.patches.moe_dispatch import INCLUDES, TIMEOUT_S
from tests.support import ROOT

CUDA = Path(__file__).with_name("cuda")
CUBLAS = ROOT / "sparkforge/build/packs/include"
# bytes of shared memory at the launch: the second template argument, sparkforge_shared_bytes.h
DYNAMIC = re.compile(r"sparkforge_device_kernel.*?Li(\d+)EEEv")
SHARED_LIMIT = 101_376
"""Limit for a block's shared memory on SM12x in bytes (99 KiB; CUDA's programming guide)."""
# tcgen05 and tensor memory (UTC…MMA, UTCBAR, LDTM, STTM) and warpgroup MMA: no SM12x has them.
# It has TMA's loads and stores (UTMALDG, UTMASTG); ptxas refuses TMA's scatter for it.
FORBIDDEN = re.compile(r"UTC\w*|LDTM|STTM|[HQI]GMMA|WARPGROUP")
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
# the smallest tile, and the largest in the other orientation, with the other epilogue
TILES = (("NONE", 128, 32, True), ("FINALIZE", 128, 128, False))
MMA = r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8"
_GEMMS = "\n".join(
    "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, __nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16,"
    f" void, EpilogueOpDefault, {fusion}, {m}, {n}, 128, 1, 1, 1, true, false, false,"
    f" {str(swap_ab).lower()});"
    for fusion, m, n, swap_ab in TILES
)
MOE = f"""
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
namespace tensorrt_llm {{ namespace kernels {{ namespace cutlass_kernels_oss {{
{_GEMMS}
}}}}}}
"""

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")


def test_moe_with_mxfp8_weights_has_block_scaled_instructions(
    cpu_context: Context, trees: dict[str, Path], tmp_path: Path
) -> None:
    """What our series adds."""
    source, cubin = tmp_path / "moe.cu", tmp_path / "moe.cubin"
    source.write_text(MOE)
    words: list[str | Path] = ["nvcc", "-std=c++17", *FLAGS]
    for include in (CUDA, CUBLAS, *(trees["patched"] / name for name in INCLUDES)):
        words += ["-isystem", include]
    call(*words, "-arch=sm_121a", "-cubin", source, "-o", cubin, timeout=TIMEOUT_S)
    kernels = Readers(cpu_context).read(cubin)
    assert len(kernels) == len(TILES)
    for kernel in kernels:
        assert kernel.mma and all(re.fullmatch(MMA, word) for word in kernel.mma), kernel
        assert not [word for word in kernel.opcodes if FORBIDDEN.fullmatch(word)], kernel
        assert kernel.stack <= 16, kernel
        dynamic = DYNAMIC.search(kernel.name)
        assert dynamic is not None
        assert kernel.shared + int(dynamic[1]) <= SHARED_LIMIT, kernel
