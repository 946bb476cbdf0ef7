"""Machine code, by cuobjdump and nvdisasm of requirements/proofs.txt → facts about its kernels."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.context import width
from sparkforge.check import tools
from sparkforge.core.errors import CheckError, CommandError
from sparkforge.core.run import call, in_parallel
from sparkforge.pins.types import compiles
from sparkforge.sources.project import Project

LOCK = "requirements/proofs.txt"
_GIB = 1.5  # an image of 19 MB takes 0.55 here, and as much in cuobjdump
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(\S+)", re.MULTILINE)
# offset, an optional predicate, the instruction with its modifiers, operands
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]*)[^;\n]*);")
_USAGE = re.compile(
    r"^\s*Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE
)
# the system's part of each block's shared memory (1 KiB in addition to the 99 of a block); the
# listing adds it to all kernels of a module if one of them uses shared memory
_RESERVED_SHARED = 1024
_MMA = re.compile(r"^(UTC)?[A-Z]{0,2}MMA\b")
# cuobjdump -all --dump-resource-usage: one of these for each image, followed by its functions
_IMAGE = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", re.MULTILINE)
_MAGIC = (b"\x7fELF", b"!<arch>", b"\x50\xed\x55\xba")  # an object, an archive, a fatbin
_ENTRY = re.compile(rb"\.entry\s+([\w$.]+)")


@dataclass(frozen=True)
class Kernel:
    """Facts about one kernel's machine code."""

    name: str
    target: str
    """E.g. ``sm_121a``; for 120f ``sm_120``."""
    registers: int
    """``registers``, ``stack``, ``local``: per thread; local memory outside the stack (bytes) is
    spilled."""
    stack: int
    local: int
    shared: int
    """Static bytes per block; those that a kernel requests at its launch are not in the code."""
    mma: Mapping[str, int]
    """Number of each matrix instruction with its modifiers."""
    opcodes: tuple[str, ...]
    traps: bool
    """It has a trap (``BPT.TRAP``), like an empty stub."""
    code: str
    """Digest of the instructions with their operands."""


@dataclass(frozen=True)
class Library:
    """Machine code of a library, or of all cubins of a folder."""

    images: Mapping[str, int]
    """Number of cubins by architecture."""
    ptx: Mapping[str, int]
    """Number of PTX texts by architecture."""
    kernels: tuple[Kernel, ...]
    """Of the cubins for the device, each content once."""
    jit: tuple[str, ...]
    """Kernels in no such cubin, which the driver compiles from PTX."""


def read(sass: str, usage: str) -> list[Kernel]:
    """Read the output of ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` for one cubin.

    CheckError: they name different kernels, or the output is not understood.
    """
    target = _TARGET.search(sass)
    resources = {name: list(map(int, numbers)) for name, *numbers in _USAGE.findall(usage)}
    pieces = _FUNCTION.split(sass)[1:]
    bodies = dict(zip(pieces[::2], map(_INSTRUCTION.findall, pieces[1::2]), strict=True))
    if bodies.keys() != resources.keys() or not all(bodies.values()) or (bodies and not target):
        msg = "cuobjdump's listings can't be read, or name different kernels"
        raise CheckError(msg, "check that nvdisasm and cuobjdump have the same version")
    found = []
    for name, body in bodies.items():
        words = Counter(word for _, word in body if word != "NOP")
        registers, stack, shared, local = resources[name]
        kernel = Kernel(
            name=name,
            target=target[1] if target else "",
            registers=registers,
            stack=stack,
            local=local,
            shared=max(0, shared - _RESERVED_SHARED),
            mma={word: number for word, number in sorted(words.items()) if _MMA.match(word)},
            opcodes=tuple(sorted({word.partition(".")[0] for word in words})),
            traps=any(word.startswith("BPT.TRAP") for word in words),
            code=hashlib.sha256("\n".join(text for text, _ in body).encode()).hexdigest()[:16],
        )
        found.append(kernel)
    return found


@dataclass(frozen=True)
class Readers:
    """cuobjdump and nvdisasm, in one folder."""

    folder: Path

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Return cuobjdump's output; CommandError if it fails."""
        # it needs nvdisasm on the PATH, and without it prints nothing, and no error
        env = {"PATH": f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        return call(self.folder / "cuobjdump", *words, cwd=cwd, env=env).stdout.decode()

    def read(self, cubin: Path) -> list[Kernel]:
        """Read a cubin; CheckError if it can't be read."""
        return read(self.run("-sass", cubin), self.run("--dump-resource-usage", cubin))

    def library(
        self, paths: Sequence[Path], capability: str, architectures: Iterable[str], work: Path
    ) -> Library:
        """Read a library, or cubins as one, with ``work`` as a folder for the images.

        ``capability``: of the device, e.g. ``12.1``; ``architectures``: of its own code, e.g.
        ``120f``. CheckError: cuobjdump can't read one of them.
        """
        images, ptx = Counter[str](), Counter[str]()
        cubins: list[Path] = []
        entries: set[str] = set()
        for path in paths:
            with path.open("rb") as file:
                if not file.read(8).startswith(_MAGIC):
                    continue  # for example a linker's script
            elf, texts = self._images(path)
            images += elf
            ptx += texts
            # cuobjdump names the cubins of 120f like those of 120
            ours = {f".sm_{arch.removesuffix('f')}.cubin" for arch in elf.keys() & {*architectures}}
            cubins += self._extract("elf", path, ours, work)
            jit = {f".sm_{arch}.ptx" for arch in texts if compiles(arch, capability)}
            for text in self._extract("ptx", path, jit, work):
                entries.update(match.decode() for match in _ENTRY.findall(text.read_bytes()))
        largest_first = sorted(cubins, key=lambda path: -path.stat().st_size)
        read = in_parallel(lambda cubin, _: self.read(cubin), largest_first, width(_GIB))
        kernels = {(kernel.name, kernel.code): kernel for found in read for kernel in found}
        jitted = sorted(entries - {name for name, _ in kernels})
        return Library(images, ptx, tuple(kernels[key] for key in sorted(kernels)), tuple(jitted))

    def _images(self, path: Path) -> tuple[Counter[str], Counter[str]]:
        """Return the number of cubins with a kernel, and of PTX texts, by architecture."""
        elf, ptx = Counter[str](), Counter[str]()
        try:
            usage = self.run("-all", "--dump-resource-usage", path)
        except CommandError as error:
            if "does not contain device code" in str(error):
                return elf, ptx
            raise CheckError(f"{path.name}: {error.what}", "check that it is complete") from error
        pieces = _IMAGE.split(usage)
        if usage and len(pieces) == 1:  # a single cubin
            elf.update(re.findall(r"\.sm_(\w+)\.cubin$", self.run("-lelf", path), re.MULTILINE))
        for form, arch, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            if form == "ptx":
                ptx[arch] += 1
            elif " Function " in text:
                elf[arch] += 1
        return elf, ptx

    def _extract(self, form: str, path: Path, ends: set[str], work: Path) -> list[Path]:
        """Extract the images whose names end with one of ``ends``."""
        if not ends:
            return []
        into = work / f"{path.name}.{form}"
        into.mkdir()
        self.run("-all", f"-x{form}", ",".join(sorted(ends)), path, cwd=into)
        return sorted(into.iterdir())


def readers(project: Project) -> Readers:
    """Return the readers for this machine, fetched if the store lacks them."""
    venv, _ = tools.install(project, project.root / LOCK, "nvidia-cuda-cuobjdump")
    (program,) = venv.glob("lib/python*/site-packages/nvidia/*/bin/cuobjdump")
    return Readers(program.parent)
