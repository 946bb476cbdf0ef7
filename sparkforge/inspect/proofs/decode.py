"""Rules for the machine code of the decode kernels as data, and their check.

Every kernel needs exactly one rule, found by its name, so a new kernel without one is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkforge.build.cubins import Kernel as Listed
from sparkforge.core.errors import ProofError
from sparkforge.inspect.proofs import sass
from sparkforge.inspect.proofs.checks import SHARED_LIMIT
from sparkforge.inspect.proofs.flow import Flow, flow
from sparkforge.inspect.proofs.listing import Instruction, functions
from sparkforge.inspect.proofs.sass import Kernel

_WIDE = r"LDG\.E\.EF\.128"
_BF16 = r"HMMA\.16816\.F32\.BF16"
_SHARED_LIMITS: Mapping[str, int] = {"12": SHARED_LIMIT, "9": 232_448}
"""Limit for a block's shared memory in bytes, by major capability (CUDA's programming guide)."""
_FOREIGN: Mapping[str, str] = {
    # tcgen05, tensor memory, warpgroups; on 9.0: tcgen05, and block-scaled products
    "12": r"UTC\w*|LDTM|STTM|[HQI]GMMA|WARPGROUP\w*",
    "9": r"UTC\w*|LDTM|STTM|[QO]MMA",
}
_LOCAL = re.compile(r"LDL|STL")
_TURNS = {"PREEXIT": "lets no next kernel begin", "ACQBULK": "does not wait for the one before"}
# EIATTR_MAX_THREADS of a kernel's attributes in `cuobjdump -elf`
_ATTRIBUTES = re.compile(r"^\.nv\.info\.(\S+)$", re.MULTILINE)
_THREADS = re.compile(r"EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)")


@dataclass(frozen=True)
class Rule:
    """Requirements for kernels.

    Attributes:
        names: pattern of the kernels.
        weights: pattern of the loads of weights, which are marked as read once (``EF``); None: the
            kernel reads none.
        scales: pattern of the other loads with that mark, and of narrower loads in the main loop.
        mma: pattern of every matrix instruction; None: there is none.
        looped: whether a main loop loads the weights.
        early: whether weights are loaded before the previous kernel has ended.
        conversions: pattern of allowed conversions in the main loop.
    """

    names: str
    weights: str | None = _WIDE
    scales: str | None = None
    mma: str | None = _BF16
    looped: bool = True
    early: bool = True
    conversions: str | None = None


RULES: tuple[Rule, ...] = (
    Rule(r"dense_mxfp[48]_(narrow_\d+|wide)_\d+", scales=r"LDG\.E\.EF"),
    Rule(r"dense_bf16_(narrow_\d+|wide)_\d+"),
    # the previous kernel chooses the experts
    Rule(r"experts_(gate_up|down)_\d+", scales=r"LDG\.E\.EF\.64", early=False),
    # gate_up waits for the router, and down for gate_up, except for the first weights
    Rule(r"experts_rows_gate_up_\d+", early=False),
    Rule(r"experts_rows_down_\d+"),
    Rule(r"route_\d+", looped=False),
    Rule(
        r"experts_combine|add_norm|rotate_and_cache",
        weights=None,
        mma=None,
        looped=False,
        early=False,
    ),
    # for prefill: its work is a conversion to BF16
    Rule(r"expand_mxfp[48]", scales=r"LDG\.E\.EF", mma=None, early=False, conversions=r"F2FP\..+"),
)


@dataclass(frozen=True)
class Decoded:
    """A kernel's machine code.

    Attributes:
        threads: of a block.
        once: number of each load that is marked as read once.
        turns: its instructions that order kernels, of the two.
        work: of a warp; None: it reads no weights.
    """

    kernel: Kernel
    threads: int
    once: Mapping[str, int]
    turns: tuple[str, ...]
    work: Flow | None


def rule_of(name: str, rules: Sequence[Rule] = RULES) -> Rule:
    """Return the rule of a kernel; ProofError if it has none, or several."""
    found = [rule for rule in rules if re.fullmatch(rule.names, name)]
    if len(found) != 1:
        msg = f"{name}: {len(found)} rules cover this kernel, not one"
        raise ProofError(msg, "state what it must have in sparkforge/inspect/proofs/decode.py")
    return found[0]


def threads_of(elf: str) -> dict[str, int]:
    """Return each kernel's limit for threads of a block in the output of ``cuobjdump -elf``."""
    pieces = _ATTRIBUTES.split(elf)[1:]
    found = {}
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        if match := _THREADS.search(text):
            x, y, z = (int(number, 16) for number in match.groups())
            found[name] = x * y * z
    return found


def decode(listing: str, usage: str, elf: str, rules: Sequence[Rule] = RULES) -> list[Decoded]:
    """Read the kernels of one cubin from three outputs of cuobjdump.

    Raises:
        ProofError: the outputs are not understood, or a kernel has no rule.
    """
    bodies, threads = functions(listing), threads_of(elf)
    return [
        _decoded(kernel, bodies[kernel.name], threads.get(kernel.name, 0), rules)
        for kernel in sass.read(listing, usage)
    ]


def _decoded(
    kernel: Kernel, body: Sequence[Instruction], threads: int, rules: Sequence[Rule]
) -> Decoded:
    rule = rule_of(kernel.name, rules)
    once: dict[str, int] = {}
    for instruction in body:
        if instruction.opcode == "LDG" and ".EF" in instruction.word:
            once[instruction.word] = once.get(instruction.word, 0) + 1
    return Decoded(
        kernel,
        threads,
        dict(sorted(once.items())),
        tuple(word for word in _TURNS if any(instruction.opcode == word for instruction in body)),
        flow(body, rule.weights) if rule.weights is not None else None,
    )


def problems(
    found: Sequence[Decoded], listed: Sequence[Listed], arch: str, rules: Sequence[Rule] = RULES
) -> list[str]:
    """Return the problems of one architecture's machine code, by kernel; none: a proof.

    Args:
        listed: the kernels of the manifest.
        arch: e.g. ``121a``.
    """
    manifest = {kernel.name: kernel for kernel in listed}
    here = {code.kernel.name for code in found}
    wrong = [f"{name}: in the manifest, not in the code" for name in sorted(manifest.keys() - here)]
    for code in found:
        name = code.kernel.name
        wrong += [
            f"{name}: {problem}"
            for problem in (
                *_of_manifest(code, manifest.get(name)),
                *_of_code(code, rule_of(name, rules), arch),
                *_of_loads(code, rule_of(name, rules)),
            )
        ]
    return wrong


def _of_manifest(code: Decoded, listed: Listed | None) -> list[str]:
    if listed is None:
        return ["in the code, not in the manifest"]
    kernel = code.kernel
    pairs = (
        ("registers", kernel.registers, listed.registers),
        ("bytes of shared memory", kernel.shared, listed.shared),
        ("bytes of stack", kernel.stack, listed.local),
    )
    found = [
        f"has {ours} {what}, the manifest {said}" for what, ours, said in pairs if ours != said
    ]
    if listed.spills:
        found.append(f"spills {listed.spills} B, says the manifest")
    return found


def _of_code(code: Decoded, rule: Rule, arch: str) -> list[str]:
    kernel, major = code.kernel, arch.rstrip("af")[:-1]
    found = []
    if kernel.target != f"sm_{arch}":
        found.append(f"is for {kernel.target}, not sm_{arch}")
    if foreign := [word for word in kernel.opcodes if re.fullmatch(_FOREIGN[major], word)]:
        found.append(f"uses {', '.join(foreign)}, which sm_{arch} lacks")
    if local := [word for word in kernel.opcodes if _LOCAL.fullmatch(word)]:
        found.append(f"uses {', '.join(local)}: local memory")
    if kernel.stack or kernel.local:
        found.append(f"spills: {kernel.stack} B stack, {kernel.local} B local")
    if kernel.shared > _SHARED_LIMITS[major]:
        found.append(
            f"needs {kernel.shared} B of shared memory, a block has {_SHARED_LIMITS[major]}"
        )
    if not code.threads:
        found.append("does not state the threads of a block")
    found += [what for word, what in _TURNS.items() if word not in code.turns]
    if rule.mma is None and kernel.mma:
        found.append(f"has {', '.join(kernel.mma)}, and needs no matrix instruction")
    if rule.mma is not None:
        if not kernel.mma:
            found.append("has no matrix instruction")
        found += [
            f"has {count} {word}, which is not {rule.mma}"
            for word, count in kernel.mma.items()
            if not re.fullmatch(rule.mma, word)
        ]
    return found


def _of_loads(code: Decoded, rule: Rule) -> list[str]:
    found = [
        f"has {count} {word}, which is not {rule.weights}: weights come 16 bytes at a time"
        for word, count in code.once.items()
        if not re.fullmatch(f"{rule.weights}|{rule.scales}", word)
    ]
    if rule.weights is None:
        return found
    work = code.work
    if work is None:
        return [*found, f"has no {rule.weights}: no load of 16 bytes of weights"]
    if rule.looped != work.looped:
        found.append("has a main loop" if work.looped else "has no main loop that loads weights")
    if rule.early and not work.early:
        found.append("loads no weights before it waits for the kernel before")
    if rule.mma is not None and not work.matrix:
        found.append("has no matrix instruction where it has its weights")
    if work.looped:
        found += [
            f"has {word} in its main loop, which is narrower than 16 bytes"
            for word in work.narrow
            if rule.scales is None or not re.fullmatch(rule.scales, word)
        ]
        found += [
            f"has {word} in its main loop: a slow conversion"
            for word in work.conversions
            if rule.conversions is None or not re.fullmatch(rule.conversions, word)
        ]
    return found
