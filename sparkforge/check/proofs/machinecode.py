"""cuobjdump's output → typed facts about each kernel."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkforge.core.errors import CheckError

_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(\S+)", re.MULTILINE)
# offset, an optional predicate, the instruction with its modifiers, operands
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]*)[^;\n]*);")
_USAGE = re.compile(
    r"^\s*Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE
)
# the second template argument of sparkforge_device_kernel, tools/proofs/include/
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
        shared: static bytes per block.
        shared_dynamic: bytes per block that a CUTLASS kernel requests at its launch; None: not in
            the code.
        mma: number of each matrix instruction with its modifiers.
        opcodes: of all instructions, sorted.
        traps: whether it has a trap (``BPT.TRAP``), like an empty stub.
        code: digest of the instructions with their operands.
    """

    name: str
    target: str
    registers: int
    stack: int
    local: int
    shared: int
    shared_dynamic: int | None
    mma: Mapping[str, int]
    opcodes: tuple[str, ...]
    traps: bool
    code: str


def usages(text: str) -> dict[str, tuple[int, int, int, int]]:
    """Return registers, stack, static shared and local memory of each kernel of one cubin.

    Args:
        text: output of ``cuobjdump --dump-resource-usage``.
    """
    found = {}
    for name, *numbers in _USAGE.findall(text):
        registers, stack, shared, local = map(int, numbers)
        found[name] = (registers, stack, max(0, shared - _RESERVED_SHARED), local)
    return found


def read(sass: str, usage: str) -> list[Kernel]:
    """Read the output of ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` for one cubin.

    Raises:
        CheckError: they name different kernels, or the output is not understood.
    """
    target, resources = _TARGET.search(sass), usages(usage)
    pieces = _FUNCTION.split(sass)[1:]
    bodies = dict(zip(pieces[::2], map(_INSTRUCTION.findall, pieces[1::2]), strict=True))
    if bodies.keys() != resources.keys() or (bodies and target is None):
        msg = f"cuobjdump's listings disagree: {len(bodies)} kernels with code, {len(resources)}"
        hint = "check that nvdisasm and cuobjdump have the same version"
        raise CheckError(f"{msg} with resources", hint)
    return [
        _kernel(name, target[1] if target else "", body, resources[name])
        for name, body in bodies.items()
    ]


def _kernel(
    name: str, target: str, body: Sequence[tuple[str, str]], usage: tuple[int, int, int, int]
) -> Kernel:
    words = Counter(word for _, word in body if word != "NOP")
    if not words:
        msg = f"{name[:60]}: no readable instruction"
        raise CheckError(msg, "this version of sparkforge cannot read cuobjdump's output")
    registers, stack, shared, local = usage
    dynamic = _SHARED_BYTES.search(name)
    return Kernel(
        name=name,
        target=target,
        registers=registers,
        stack=stack,
        local=local,
        shared=shared,
        shared_dynamic=int(dynamic[1]) if dynamic else None,
        mma={word: count for word, count in sorted(words.items()) if _MMA.match(word)},
        opcodes=tuple(sorted({word.partition(".")[0] for word in words})),
        traps=any(word.startswith("BPT.TRAP") for word in words),
        code=hashlib.sha256("\n".join(text for text, _ in body).encode()).hexdigest()[:16],
    )
