"""The parts of pins.yaml about machine code: how it is compiled, and what wheels may hold."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from sparkforge.pins import types as t
from sparkforge.pins.types import Model, below

Device = Literal["empty", "cpu", "cuda"]


class Native(Model):
    """One native file of the release wheel."""

    file: t.FilePath
    """Path in the wheel."""
    target: t.CMakeTarget
    """The CMake target and install component that builds it."""
    device: Device
    """Configuration of the upstream's CMake. ``empty``: neither GPU nor CPU kernels, so that it
    reads none of the upstream's ``externals``."""
    sources: tuple[t.Place, ...] = ()
    """Its sources in the repository. Empty: they are outside, so no patch can change it."""
    besides: tuple[t.Place, ...] = ()
    """Files and folders below ``sources`` that are not its sources."""
    blocked: str | None = None
    """Reason why the pinned inputs are not enough to compile it."""

    def made_from(self, path: str) -> bool:
        """Return whether a file of the repository is one of its sources."""
        return below(path, self.sources) and not below(path, self.besides)


class Compile(Model):
    """Settings for compiling wheels of an upstream."""

    blocked: str | None = None
    """Reason why they can't be compiled: they are overlaid."""
    variables: Mapping[t.Variable, str] = Field(default_factory=dict)
    """Environment of the wheel's build."""
    configure: tuple[t.CMakeWord, ...] = ()
    """Arguments for CMake; ``{device}`` stands for a native's device."""
    natives: tuple[Native, ...] = ()
    redirect: t.Variable | None = None
    """Variable with the folder of this upstream's patched files (the first of ``paths``), for the
    build of a wheel that carries it."""


class Plugin(Model):
    """Our plugin for vLLM: its folder, and what the stage ``kernels`` compiles of it."""

    folder: t.Folder
    """In the checkout: ``pyproject.toml``, ``csrc/`` and the Python package."""
    architectures: Annotated[tuple[t.GpuCode, ...], Field(min_length=1)]
    requirements: t.FilePath
    """Hash-locked requirements of the compiler, relative to pins.yaml."""
    spills: tuple[t.Name, ...] = ()
    """Kernels that may keep registers in memory; others may not."""

    @property
    def source(self) -> str:
        """The file to compile; it includes files of its folder only."""
        return f"{self.folder}csrc/kernels.cu"


# -- contracts: build.py proofs --wheel ------------------------------------------------


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression; it must match anywhere in a kernel's mangled name."""


class Kernels(Model):
    """Kernels of a library that must have certain instructions."""

    kernels: Pattern
    mma: Pattern
    """Each of them has a matrix instruction that matches this completely."""
    least: t.Count = 1
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
    stack: t.Bytes | None = None
    """Limit for a thread's stack in bytes, instead of the contract's."""
    needs: tuple[Kernels, ...] = ()
    jit: tuple[Excused, ...] = ()
    """Kernels that may be in PTX only."""
    stubs: tuple[Excused, ...] = ()
    """Kernels that may be empty stubs, which trap."""


class Contract(Model):
    """Limits and rules for the kernels of a family of devices."""

    registers: t.Count
    """Limit for a thread's registers."""
    shared: t.Count
    """Limit for a block's shared memory in bytes."""
    stack: t.Bytes = 0
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

    contract: t.Name
    """Among ``contracts``."""
    architectures: Annotated[tuple[t.GpuCode, ...], Field(min_length=1)]
    """Architectures of the target's own machine code; code for others is not checked."""


def loads(code: str, device: str) -> bool:
    """Return whether a device (``12.1``) loads machine code for an architecture (``120f``)."""
    bare = code.rstrip("af")
    major, minor = int(bare[:-1]), int(bare[-1])
    ours, ours_minor = map(int, device.split("."))
    if code.endswith("a"):
        return (major, minor) == (ours, ours_minor)
    return major == ours and minor <= ours_minor


def compiles(ptx: str, device: str) -> bool:
    """Return whether a driver compiles PTX for an architecture (``80``) to a device's code."""
    if not ptx.isdecimal():  # 90a, 120f: as machine code
        return loads(ptx, device)
    return int(ptx) <= int(device.replace(".", ""))
