"""Compile units with nvcc and our own headers."""

from __future__ import annotations

from pathlib import Path

from sparkforge.core.run import call

INCLUDE = Path(__file__).with_name("include")
"""Our own sources and headers."""
_CUBLAS = Path(__file__).parents[2] / "sparkforge/build/packs/include"

# As FlashInfer 0.7.0.post1 compiles its fused MoE for SM12x (jit/cpp_ext.py, jit/fused_moe.py).
# Without flags of a host object, since the result is a cubin.
_FLAGS = (
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-std=c++17",
    "-use_fast_math",
    "-DNDEBUG",
    "-O3",
    *(
        f"-DFLASHINFER_ENABLE_{kind}"
        for kind in ("FP8_E8M0", "FP4_E2M1", "F16", "BF16", "FP8_E4M3", "FP8_E5M2")
    ),
    "-DCOMPILE_BLACKWELL_TMA_GEMMS",
    "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS",
    "-DENABLE_BF16",
    "-DENABLE_FP8",
    "-DENABLE_FP4",
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
    "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
)
_INTERNAL = "csrc/nv_internal"
INCLUDES = (
    _INTERNAL,
    f"{_INTERNAL}/include",
    f"{_INTERNAL}/tensorrt_llm/cutlass_extensions/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels",
    "3rdparty/cccl/cub",
    "3rdparty/cccl/libcudacxx/include",
    "3rdparty/cccl/thrust",
    "include",
    "csrc",
    "3rdparty/cutlass/include",
    "3rdparty/cutlass/tools/util/include",
    "3rdparty/spdlog/include",
)


def identity() -> str:
    """Return nvcc's release and build; MachineError if it is not on the PATH."""
    lines = call("nvcc", "--version").stdout.decode().strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:])


def compile_unit(source: Path, arch: str, tree: Path | None, out: Path) -> None:
    """Compile a source to machine code of one architecture, without host code.

    Args:
        arch: e.g. ``121a``.
        tree: FlashInfer's patched tree, for its headers, or None.
        out: the cubin.

    Raises:
        MachineError, CommandError: nvcc is missing or fails.
    """
    words: list[str | Path] = ["-std=c++17"]
    if tree is not None:
        words = [*_FLAGS, "-include", "sparkforge_shared_bytes.h"]
        for include in (INCLUDE, _CUBLAS, *(tree / path for path in INCLUDES)):
            words += ["-isystem", include]
    call("nvcc", *words, f"-arch=sm_{arch}", "-cubin", source, "-o", out)
