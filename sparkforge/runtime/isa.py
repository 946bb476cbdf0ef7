"""The instruction sets that vLLM's CPU backend distinguishes, and how to hide some."""

from pathlib import Path
from typing import Literal, get_args

InstructionSet = Literal["amx", "avx512_bf16", "avx512", "avx2"]
"""Best first. vLLM's wheel has an extension each for avx512_bf16 (AMX in it), avx512 and avx2; its
own MXFP4 experts are for amx."""

INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
MASK = Path(__file__).parent / "isamask" / "sitecustomize.py"
# the kernel's names in /proc/cpuinfo
_FLAGS = {"amx": "amx_tile", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}
# their names in oneDNN, which reads a variable of its own
_ONEDNN = {"avx512_bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE", "avx2": "AVX2"}


def best(cpuinfo: str) -> InstructionSet | None:
    """Return the best set of an x86-64 CPU, from the text of /proc/cpuinfo, or None."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    flags = next(lines, "").partition(":")[2].split()
    return next((name for name in INSTRUCTION_SETS if _FLAGS[name] in flags), None)


def here() -> InstructionSet | None:
    """Return the best set of this machine; None if vLLM does not support its CPU."""
    return best(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def hiding(highest: InstructionSet) -> dict[str, str]:
    """Return the variables with which a process, and those it starts, see no better set.

    The process must not ignore PYTHONPATH (``python -I``). ATen and oneDNN, which look at the CPU
    themselves, are limited by their own variables.
    """
    variables = {"SPARKFORGE_CPU_ISA": highest, "PYTHONPATH": str(MASK.parent)}
    if highest != "amx":
        variables["ONEDNN_MAX_CPU_ISA"] = _ONEDNN[highest]
    if highest == "avx2":
        variables["ATEN_CPU_CAPABILITY"] = "avx2"
    return variables
