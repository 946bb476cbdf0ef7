"""What pins.yaml says of the machine code in a target's wheels: ``build.py proofs --wheel``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from sparkforge.pins.types import Count, GpuCode, Model, Name, number


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        msg = f"is no regular expression: {error}"
        raise ValueError(msg) from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression; it must match anywhere in a kernel's mangled name."""
Bytes = Annotated[int, BeforeValidator(number), Field(ge=0, strict=True)]


class Kernels(Model):
    """Kernels of a library that must have certain instructions."""

    kernels: Pattern
    mma: Pattern
    """Each of them has a matrix instruction that matches this completely."""
    least: Count = 1
    """Number of such kernels."""


class Excused(Model):
    """Kernels that may break a rule, with the reason."""

    kernels: Pattern
    reason: str


class Code(Model):
    """Rules for files of a wheel."""

    files: str
    """Pattern of their paths in the wheel (fnmatch); machine code without a host library counts as
    one library for each folder, named ``FOLDER/*.cubin``."""
    unused: str | None = None
    """Why the target runs no kernel of them; they are counted, not checked."""
    stack: Bytes | None = None
    """Most bytes of stack of a thread, instead of the contract's."""
    needs: tuple[Kernels, ...] = ()
    jit: tuple[Excused, ...] = ()
    """Kernels that may be in PTX only."""
    stubs: tuple[Excused, ...] = ()
    """Kernels that may be empty stubs, which trap."""


class Contract(Model):
    """Limits and rules for the kernels of a family of devices."""

    registers: Count
    """Most registers of a thread."""
    shared: Count
    """Most bytes of shared memory of a block."""
    stack: Bytes = 0
    """Most bytes of stack of a thread: spilled registers, and arrays with a computed index."""
    foreign: Pattern
    """Opcodes that no device of the family has."""
    libraries: tuple[Code, ...] = ()
    """The first one that fits a file applies; no entry: the limits above, and no exception."""

    def rules(self, file: str) -> Code:
        """Return the rules for a file of a wheel."""
        fitting = (one for one in self.libraries if fnmatchcase(file, one.files))
        return next(fitting, Code(files=file))


class MachineCode(Model):
    """The contract that a target's wheels must keep."""

    contract: Name
    """Among ``contracts``."""
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    """Of machine code that counts as the target's own; others are not checked."""
