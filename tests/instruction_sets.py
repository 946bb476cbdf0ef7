"""Hide instruction sets of the CPU from torch, and so from vLLM's selection."""

from sparkforge.runtime import isa


def hiding(highest: isa.InstructionSet) -> dict[str, str]:
    """Return the variables with which a process, and those it starts, see no better set."""
    oned = {"avx512_bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2"}
    variables = {**isa.NO_AMX, "SPARKFORGE_CPU_ISA": highest}
    del variables["ONEDNN_MAX_CPU_ISA"]
    if highest != "amx":
        variables["ONEDNN_MAX_CPU_ISA"] = oned[highest]
    if highest == "avx2":  # ATen looks at the CPU itself
        variables["ATEN_CPU_CAPABILITY"] = "avx2"
    return variables
