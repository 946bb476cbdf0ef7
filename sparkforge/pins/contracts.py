"""The part of pins.yaml about machine code in a target's wheels: ``build.py proofs --wheel``."""

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
    """Reason why the target runs no kernel of them; they are counted, not checked."""
    stack: Bytes | None = None
    """Limit for a thread's stack in bytes, instead of the contract's."""
    needs: tuple[Kernels, ...] = ()
    jit: tuple[Excused, ...] = ()
    """Kernels that may be in PTX only."""
    stubs: tuple[Excused, ...] = ()
    """Kernels that may be empty stubs, which trap."""


class Contract(Model):
    """Limits and rules for the kernels of a family of devices."""

    registers: Count
    """Limit for a thread's registers."""
    shared: Count
    """Limit for a block's shared memory in bytes."""
    stack: Bytes = 0
    """Limit for a thread's stack in bytes: spilled registers, and arrays with a computed index."""
    foreign: Pattern
    """Opcodes that no device of the family has."""
    libraries: tuple[Code, ...] = ()
    """The first entry that matches a file applies; without one: the limits above, no exceptions."""

    def rules(self, file: str) -> Code:
        """Return the rules for a file of a wheel."""
        fitting = (code for code in self.libraries if fnmatchcase(file, code.files))
        return next(fitting, Code(files=file))


class MachineCode(Model):
    """The contract that a target's wheels must keep."""

    contract: Name
    """Among ``contracts``."""
    architectures: Annotated[tuple[GpuCode, ...], Field(min_length=1)]
    """Architectures of the target's own machine code; code for others is not checked."""


def loads(code: str, device: str) -> bool:
    """Return whether a device loads machine code for an architecture.

    Args:
        code: e.g. ``120f``.
        device: compute capability, e.g. ``12.1``.
    """
    bare = code.rstrip("af")
    major, minor = int(bare[:-1]), int(bare[-1])
    ours, ours_minor = map(int, device.split("."))
    if code.endswith("a"):
        return (major, minor) == (ours, ours_minor)
    return major == ours and minor <= ours_minor


def compiles(ptx: str, device: str) -> bool:
    """Return whether a driver compiles PTX for an architecture to a device's machine code.

    Args:
        ptx: e.g. ``80``.
        device: compute capability, e.g. ``12.1``.
    """
    if not ptx.isdecimal():  # 90a, 120f: as machine code
        return loads(ptx, device)
    return int(ptx) <= int(device.replace(".", ""))
