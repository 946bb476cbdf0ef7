"""Compare facts about a library's kernels with the contract of a target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparkforge.core.log import counted
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.wheelcode import CodeResult, Device, Library
from sparkforge.pins.contracts import Code, Contract, Excused

# a stub at most reads constants, and stops; an assertion's trap comes with other work
_WORK = re.compile(r"LD[GSL]?|LDSM|LDGSTS|ST[GSL]?|ATOM\w*|RED\w*|UTMA\w*|UBLK\w*")


@dataclass(frozen=True)
class Problem:
    """A broken rule.

    Attributes:
        library: the file in the wheel.
        rule: its name in docs/proofs.md.
        kernel: mangled name; "": the library as a whole.
        text: the problem.
    """

    library: str
    rule: str
    kernel: str
    text: str


@dataclass(frozen=True)
class Checked:
    """A library with its problems.

    Attributes:
        unused: reason why the target does not use it, so nothing is checked; "": used.
    """

    library: Library
    unused: str
    problems: tuple[Problem, ...]


def check(library: Library, contract: Contract, device: Device) -> Checked:
    """Compare a library with the contract."""
    rules = contract.rules(library.file)
    if rules.unused is not None:
        return Checked(library, rules.unused, ())
    found = (
        Problem(library.file, rule, kernel, text)
        for rule, kernel, text in (
            *_loads(library.code, device),
            *_native(library.code, rules, device),
            *_needed(library.code.kernels, rules),
            *_each(library.code.kernels, rules, contract),
        )
    )
    return Checked(library, "", tuple(found))


_Found = Iterator[tuple[str, str, str]]


def _loads(code: CodeResult, device: Device) -> _Found:
    if not code.kernels and not code.jit:
        archs = ", ".join(sorted({*code.images, *code.ptx}))
        yield "loads", "", f"has code for {archs}: nothing of it runs on {device.capability}"


def _native(code: CodeResult, rules: Code, device: Device) -> _Found:
    for name in code.jit:
        if not _excused(name, rules.jit):
            yield "native", name, f"is in PTX only: compiled at run time on {device.capability}"


def _needed(kernels: Sequence[Kernel], rules: Code) -> _Found:
    for need in rules.needs:
        named = [kernel for kernel in kernels if re.search(need.kernels, kernel.name)]
        if len(named) < need.least:
            yield "mma", "", f"has {counted(len(named), 'kernel')} {need.kernels}, not {need.least}"
        for kernel in named:
            if not any(re.fullmatch(need.mma, word) for word in kernel.mma):
                has = ", ".join(kernel.mma) or "none"
                yield "mma", kernel.name, f"has no {need.mma}; matrix instructions: {has}"


def _each(kernels: Sequence[Kernel], rules: Code, contract: Contract) -> _Found:
    stack = contract.stack if rules.stack is None else rules.stack
    for kernel in kernels:
        name = kernel.name
        stub = kernel.traps and not any(map(_WORK.fullmatch, kernel.opcodes))
        if stub and not _excused(name, rules.stubs):
            yield "stub", name, "only traps: an empty stub"
        if foreign := [word for word in kernel.opcodes if re.fullmatch(contract.foreign, word)]:
            yield "foreign", name, f"uses {', '.join(foreign)}, which the device lacks"
        if kernel.registers > contract.registers:
            yield "registers", name, f"uses {kernel.registers} registers, not {contract.registers}"
        if kernel.stack + kernel.local > stack:
            yield "stack", name, f"has {kernel.stack + kernel.local} B of stack, not {stack}"
        shared = kernel.shared + (kernel.shared_dynamic or 0)
        if shared > contract.shared:
            yield (
                "shared",
                name,
                f"needs {shared} B of shared memory, a block has {contract.shared}",
            )


def _excused(name: str, exceptions: Sequence[Excused]) -> bool:
    return any(re.search(exception.kernels, name) for exception in exceptions)
