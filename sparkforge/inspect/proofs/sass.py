"""cuobjdump's words → typed facts about each kernel."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sparkforge.core.errors import ProofError

_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(\S+)", re.MULTILINE)
# offset, a predicate where there is one, the instruction with its modifiers
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<all>(?:@!?U?P\S+\s+)?(?P<word>[A-Z][A-Z0-9_.]*)[^;]*);"
)
_USAGE = re.compile(
    r"^\s*Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE
)
# the second template argument of sparkforge_device_kernel, include/sparkforge_shared_bytes.h
_SHARED_BYTES = re.compile(r"sparkforge_device_kernel.*?Li(\d+)EEEv")
# what the system keeps of each block's shared memory (1 KiB beside the 99 that a block may have);
# the listing adds it to what kernels of a module have, once one of them uses shared memory
_RESERVED_SHARED = 1024
_MMA = re.compile(r"^(UTC)?[A-Z]{0,2}MMA\b")


@dataclass(frozen=True)
class Kernel:
    """What one kernel's machine code is.

    Attributes:
        name: mangled.
        target: what it is for, as the code says (``sm_121a``; 120f says ``sm_120``).
        registers: a thread.
        stack, local: bytes a thread; local memory that is no stack is what does not fit.
        spill_loads, spill_stores: instructions that read or write local memory.
        shared: bytes a block, static.
        shared_dynamic: bytes a block that a CUTLASS kernel asks for at its launch; None where
            the code does not say.
        mma: matrix instructions with their modifiers, and how often each stands in the code.
        opcodes: first words of all instructions, sorted.
        instructions: how many there are, padding left out.
        traps: whether it stops on purpose (``BPT.TRAP``): what an empty stub does.
        code: digest of its instructions with their operands: equal for equal code.
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
    """Read what ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` say of one cubin.

    Raises:
        ProofError: they name different kernels, or say what this does not understand.
    """
    target = _TARGET.search(sass)
    pieces = _FUNCTION.split(sass)[1:]
    bodies = dict(zip(pieces[::2], pieces[1::2], strict=True))
    resources = {name: [int(n) for n in numbers] for name, *numbers in _USAGE.findall(usage)}
    if bodies.keys() != resources.keys() or (bodies and target is None):
        msg = (
            f"cuobjdump's listings disagree: {len(bodies)} kernel(s) with code,"
            f" {len(resources)} with resources"
        )
        raise ProofError(msg, "check that nvdisasm and cuobjdump have the same version")
    return [
        _kernel(name, target[1] if target else "", body, resources[name])
        for name, body in bodies.items()
    ]


def _kernel(name: str, target: str, body: str, resources: list[int]) -> Kernel:
    lines = [match for line in body.splitlines() if (match := _INSTRUCTION.match(line))]
    found = Counter(match["word"] for match in lines)
    code = hashlib.sha256("\n".join(match["all"].strip() for match in lines).encode())
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
