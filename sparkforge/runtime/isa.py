"""The instruction sets that vLLM's CPU backend distinguishes, and how to hide some."""

from pathlib import Path
from typing import Literal, get_args

InstructionSet = Literal["amx", "avx512_bf16", "avx512", "avx2"]
"""Best first. vLLM's wheel has an extension each for avx512_bf16 (AMX in it), avx512 and avx2; its
own MXFP4 experts are for amx."""

INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
_MASK = Path(__file__).parent / "isamask"
NO_AMX = {
    "SPARKFORGE_CPU_ISA": "avx512_bf16",
    "PYTHONPATH": str(_MASK),
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # oneDNN looks at the CPU itself
}
"""Variables with which a process, and those it starts, see no AMX. It must not ignore PYTHONPATH
(``python -I``)."""
IN_IMAGE = {
    "sparkforge_isa_mask.py": _MASK / "sitecustomize.py",
    "sparkforge_isa_mask.pth": _MASK / "mask.pth",
}
"""Files that do the same in an image, by path below site-packages: its server runs with ``-I``, so
a line in a .pth file imports the mask."""
# the kernel's names in /proc/cpuinfo
_FLAGS = {"amx": "amx_tile", "avx512_bf16": "avx512_bf16", "avx512": "avx512f", "avx2": "avx2"}


def best(cpuinfo: str) -> InstructionSet | None:
    """Return the best set of an x86-64 CPU, from the text of /proc/cpuinfo, or None."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    flags = next(lines, "").partition(":")[2].split()
    return next((name for name in INSTRUCTION_SETS if _FLAGS[name] in flags), None)


def here() -> InstructionSet | None:
    """Return the best set of this machine; None if vLLM does not support its CPU."""
    return best(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
