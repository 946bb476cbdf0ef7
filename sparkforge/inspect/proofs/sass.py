"""cuobjdump's output → typed facts about each kernel."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkforge.core.errors import ProofError
from sparkforge.core.log import counted
from sparkforge.inspect.proofs.listing import words

_TARGET = re.compile(r"^\s*\.target\s+(\S+)", re.MULTILINE)
_USAGE = re.compile(
    r"^\s*Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE
)
# the second template argument of sparkforge_device_kernel, include/sparkforge_shared_bytes.h
_SHARED_BYTES = re.compile(r"sparkforge_device_kernel.*?Li(\d+)EEEv")
# the system's part of each block's shared memory (1 KiB in addition to the 99 of a block); the
# listing adds it to all kernels of a module if one of them uses shared memory
_RESERVED_SHARED = 1024
_MMA = re.compile(r"^(UTC)?[A-Z]{0,2}MMA\b")


@dataclass(frozen=True)
class Kernel:
    """Facts about one kernel's machine code.

    Attributes:
        name: mangled.
        target: the code's target (``sm_121a``; for 120f ``sm_120``).
        registers: per thread.
        stack, local: bytes per thread; local memory outside the stack is spilled.
        spill_loads, spill_stores: instructions that read or write local memory.
        shared: static bytes per block.
        shared_dynamic: bytes per block that a CUTLASS kernel requests at its launch; None: not in
            the code.
        mma: number of each matrix instruction with its modifiers.
        opcodes: of all instructions, sorted.
        instructions: their number, without padding.
        traps: whether it has a trap (``BPT.TRAP``), like an empty stub.
        code: digest of the instructions with their operands.
    """

    name: str
    target: str
    registers: int
    stack: int
    local: int
    spill_loads: int
    spill_stores: int
    shared: int
    shared_dynamic: int | None
    mma: Mapping[str, int]
    opcodes: tuple[str, ...]
    instructions: int
    traps: bool
    code: str


def read(sass: str, usage: str) -> list[Kernel]:
    """Read the output of ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` for one cubin.

    Raises:
        ProofError: they name different kernels, or the output is not understood.
    """
    target = _TARGET.search(sass)
    bodies = words(sass)
    resources = {name: [int(n) for n in numbers] for name, *numbers in _USAGE.findall(usage)}
    if bodies.keys() != resources.keys() or (bodies and target is None):
        msg = (
            f"cuobjdump's listings disagree: {counted(len(bodies), 'kernel')} with code,"
            f" {len(resources)} with resources"
        )
        raise ProofError(msg, "check that nvdisasm and cuobjdump have the same version")
    return [
        _kernel(name, target[1] if target else "", body, resources[name])
        for name, body in bodies.items()
    ]


def _kernel(
    name: str, target: str, body: Sequence[tuple[str, str]], resources: list[int]
) -> Kernel:
    found = Counter(word for _, word in body)
    code = hashlib.sha256("\n".join(text.strip() for text, _ in body).encode())
    del found["NOP"]
    if not found:
        msg = f"{name[:60]}: no readable instruction"
        raise ProofError(msg, "this version of sparkforge cannot read cuobjdump's output")
    registers, stack, shared, local = resources
    dynamic = _SHARED_BYTES.search(name)
    first_words = Counter[str]()
    for instruction, count in found.items():
        first_words[instruction.partition(".")[0]] += count
    return Kernel(
        name=name,
        target=target,
        registers=registers,
        stack=stack,
        local=local,
        spill_loads=first_words["LDL"],
        spill_stores=first_words["STL"],
        shared=max(0, shared - _RESERVED_SHARED),
        shared_dynamic=int(dynamic[1]) if dynamic else None,
        mma={word: count for word, count in sorted(found.items()) if _MMA.match(word)},
        opcodes=tuple(sorted(word for word, count in first_words.items() if count)),
        instructions=found.total(),
        traps=any(word.startswith("BPT.TRAP") for word in found),
        code=code.hexdigest()[:16],
    )
