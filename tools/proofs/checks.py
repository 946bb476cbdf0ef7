"""Compare facts about kernels with a unit's promise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkforge.check.proofs.machinecode import Kernel

SHARED_LIMIT = 101_376
"""Limit for a block's shared memory on SM12x in bytes (99 KiB; CUDA's programming guide)."""

STUB = "it only traps: an empty stub"

# tcgen05 and tensor memory (UTC…MMA, UTCBAR, LDTM, STTM) and warpgroup MMA: no SM12x has them.
# It has TMA's loads and stores (UTMALDG, UTMASTG); ptxas refuses TMA's scatter for it.
_FORBIDDEN = re.compile(r"UTC\w*|LDTM|STTM|[HQI]GMMA|WARPGROUP")


@dataclass(frozen=True)
class Promise:
    """Requirements for every kernel of a unit.

    Attributes:
        mma: pattern that each matrix instruction must match completely; each kernel must have one.
            None: kernels need none.
        kernels: required number of kernels with matrix instructions; None: at least one.
        stack: allowed spilled bytes per thread, as measured, to notice more. None: any, for
            unpatched kernels.
        sized: whether kernels must state their dynamic shared memory.
    """

    mma: str | None
    kernels: int | None = None
    stack: int | None = 0
    sized: bool = False


def problems(
    kernels: Sequence[Kernel], promise: Promise, arch: str, count: int | None = None
) -> list[str]:
    """Return the problems; an empty list is a proof.

    Args:
        arch: e.g. ``121a``.
        count: required number of kernels, None: at least one.
    """
    if not kernels:
        return ["has no kernel"]
    found = [problem for kernel in kernels for problem in _problems(kernel, promise, arch)]
    if count is not None and len(kernels) != count:
        found.append(f"has {len(kernels)} kernels, not {count}")
    return found


def _problems(kernel: Kernel, promise: Promise, arch: str) -> list[str]:
    found = []
    # the machine code has no f: 120f is sm_120 there, like plain 120
    if kernel.target != f"sm_{arch.removesuffix('f')}":
        found.append(f"is for {kernel.target}, not sm_{arch}")
    if bad := [word for word in kernel.opcodes if _FORBIDDEN.fullmatch(word)]:
        found.append(f"uses {', '.join(bad)}, which no SM12x has")
    if promise.mma is not None:
        if not kernel.mma:
            stub = f": {STUB}" if kernel.traps else ""
            found.append(f"has no matrix instruction{stub}")
        found += [
            f"has {count} {word}, which is not {promise.mma}"
            for word, count in kernel.mma.items()
            if not re.fullmatch(promise.mma, word)
        ]
    if promise.stack is not None and (kernel.stack > promise.stack or kernel.local):
        found.append(f"spills: {kernel.stack} B stack, {kernel.local} B local, not {promise.stack}")
    shared = kernel.shared + (kernel.shared_dynamic or 0)
    if shared > SHARED_LIMIT:
        found.append(f"needs {shared} B of shared memory; a block has {SHARED_LIMIT} at most")
    if promise.sized and kernel.shared_dynamic is None:
        found.append("does not state its dynamic shared memory")
    return [f"{kernel.name[:60]}: {problem}" for problem in found]
