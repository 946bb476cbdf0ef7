"""Compare facts about a library's kernels with the contract of a target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparkforge.check.proofs.machinecode import Kernel
from sparkforge.check.proofs.wheelcode import CodeResult, Device, Library
from sparkforge.pins.compiling import Code, Contract, Excused

# a stub at most reads constants, and stops; an assertion's trap comes with other work
_WORK = re.compile(r"LD[GSL]?|LDSM|LDGSTS|ST[GSL]?|ATOM\w*|RED\w*|UTMA\w*|UBLK\w*")


@dataclass(frozen=True)
class Problem:
    """A broken rule.

    Attributes:
        rule: its name in docs/kernels.md.
        kernel: mangled name; "": the library as a whole.
        text: the problem.
    """

    rule: str
    kernel: str
    text: str


def check(library: Library, contract: Contract, device: Device) -> list[Problem]:
    """Return the rules that a library breaks; none if the target does not use it."""
    rules = contract.rules(library.file)
    if rules.unused is not None:
        return []
    return [
        *_code(library.code, rules, device),
        *_needed(library.code.kernels, rules),
        *(
            problem
            for kernel in library.code.kernels
            for problem in _limits(kernel, rules, contract)
        ),
    ]


def _code(code: CodeResult, rules: Code, device: Device) -> Iterator[Problem]:
    if not code.kernels and not code.jit:
        archs = ", ".join(sorted({*code.images, *code.ptx}))
        text = f"has code for {archs}: nothing of it runs on {device.capability}"
        yield Problem("loads", "", text)
    for name in code.jit:
        if not _excused(name, rules.jit):
            text = f"is in PTX only: compiled at run time on {device.capability}"
            yield Problem("native", name, text)


def _needed(kernels: Sequence[Kernel], rules: Code) -> Iterator[Problem]:
    for need in rules.needs:
        named = [kernel for kernel in kernels if re.search(need.kernels, kernel.name)]
        if len(named) < need.least:
            text = f"has {len(named)} kernels {need.kernels}, not {need.least}"
            yield Problem("mma", "", text)
        for kernel in named:
            if not any(re.fullmatch(need.mma, word) for word in kernel.mma):
                has = ", ".join(kernel.mma) or "none"
                text = f"has no {need.mma}; matrix instructions: {has}"
                yield Problem("mma", kernel.name, text)


def _limits(kernel: Kernel, rules: Code, contract: Contract) -> Iterator[Problem]:
    name = kernel.name
    stub = kernel.traps and not any(map(_WORK.fullmatch, kernel.opcodes))
    if stub and not _excused(name, rules.stubs):
        yield Problem("stub", name, "only traps: an empty stub")
    if foreign := [word for word in kernel.opcodes if re.fullmatch(contract.foreign, word)]:
        yield Problem("foreign", name, f"uses {', '.join(foreign)}, which the device lacks")
    for rule, has, most in (
        ("registers", kernel.registers, contract.registers),
        (
            "stack",
            kernel.stack + kernel.local,
            contract.stack if rules.stack is None else rules.stack,
        ),
        ("shared", kernel.shared + (kernel.shared_dynamic or 0), contract.shared),
    ):
        if has > most:
            yield Problem(rule, name, f"{rule}: {has}, the limit is {most}")


def _excused(name: str, exceptions: Sequence[Excused]) -> bool:
    return any(re.search(exception.kernels, name) for exception in exceptions)
