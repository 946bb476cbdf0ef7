"""`build.py proofs`: machine code of a target's wheels, compared with its contract of pins.yaml.

The programs of requirements/proofs.txt, cuobjdump and nvdisasm, read it.
"""

import hashlib
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from sparkforge.build.context import width
from sparkforge.build.options import StoreOptions, command_options
from sparkforge.build.stages import thirdparty
from sparkforge.core.disk import sha256_file, write_file
from sparkforge.core.errors import CheckError, CommandError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call, in_parallel
from sparkforge.pins.pins import Target
from sparkforge.pins.types import Contract, Excused, compiles
from sparkforge.sources.project import Project
from sparkforge.store.store import Store
from sparkforge.wheels import intake

LOCK = "requirements/proofs.txt"
_GIB = 1.5  # an image of 19 MB takes 0.55 here, and as much in cuobjdump
_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
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
_PTX = "compute_"
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)")
_NATIVE = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin|a|o|pyd)$")
# a stub at most reads constants, and stops; an assertion's trap comes with other work
_WORK = re.compile(r"LD[GSL]?|LDSM|LDGSTS|ST[GSL]?|ATOM\w*|RED\w*|UTMA\w*|UBLK\w*")
_SHOWN = 5  # problems of a library in the log; the report has all


@dataclass(frozen=True)
class Kernel:
    """Facts about one kernel's machine code."""

    name: str
    registers: int
    stack: int
    """Bytes of a thread, with spilled registers."""
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
    """Number of cubins by architecture, and of PTX texts by ``compute_`` and theirs."""
    kernels: tuple[Kernel, ...]
    """Of the cubins for the device, each content once."""
    jit: tuple[str, ...]
    """Kernels in no such cubin, which the driver compiles from PTX."""


def read(sass: str, usage: str) -> list[Kernel]:
    """Read the output of ``cuobjdump -sass`` and ``cuobjdump --dump-resource-usage`` for one cubin.

    CheckError: they name different kernels, or the output is not understood.
    """
    resources = {name: list(map(int, numbers)) for name, *numbers in _USAGE.findall(usage)}
    pieces = _FUNCTION.split(sass)[1:]
    bodies = dict(zip(pieces[::2], map(_INSTRUCTION.findall, pieces[1::2]), strict=True))
    if bodies.keys() != resources.keys() or not all(bodies.values()):
        msg = "cuobjdump's listings can't be read, or name different kernels"
        raise CheckError(msg, "check that nvdisasm and cuobjdump have the same version")
    found = []
    for name, body in bodies.items():
        words = Counter(word for _, word in body if word != "NOP")
        registers, stack, shared, local = resources[name]
        kernel = Kernel(
            name=name,
            registers=registers,
            stack=stack + local,
            shared=max(0, shared - _RESERVED_SHARED),
            mma={word: number for word, number in sorted(words.items()) if _MMA.match(word)},
            opcodes=tuple(sorted({word.partition(".")[0] for word in words})),
            traps=any(word.startswith("BPT.TRAP") for word in words),
            code=hashlib.sha256("\n".join(text for text, _ in body).encode()).hexdigest()[:16],
        )
        found.append(kernel)
    return found


class Readers:
    """cuobjdump and nvdisasm for this machine, fetched if the store lacks them."""

    def __init__(self, project: Project) -> None:
        lock = project.root / LOCK
        venv, _ = thirdparty.install(project, lock, "nvidia-cuda-cuobjdump")
        (self._folder,) = venv.glob("lib/python*/site-packages/nvidia/*/bin")

    def _run(self, *words: str | Path, cwd: Path | None = None) -> str:
        # it needs nvdisasm on the PATH, and without it prints nothing, and no error
        env = {"PATH": f"{self._folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        return call(self._folder / "cuobjdump", *words, cwd=cwd, env=env).stdout.decode()

    def read(self, cubin: Path) -> list[Kernel]:
        """Read a cubin; CheckError if it can't be read."""
        return read(self._run("-sass", cubin), self._run("--dump-resource-usage", cubin))

    def library(self, paths: Sequence[Path], target: Target) -> Library:
        """Read a library, or cubins as one; images are extracted beside them.

        CheckError: cuobjdump can't read one of them.
        """
        code, device = target.machine_code, target.cuda_arch
        assert code is not None and device is not None
        images = Counter[str]()
        cubins: list[Path] = []
        entries: set[str] = set()
        for path in paths:
            with path.open("rb") as file:
                if not file.read(8).startswith(_MAGIC):
                    continue  # for example a linker's script
            found = self._images(path)
            images += found
            # cuobjdump names the cubins of 120f like those of 120
            ours = [arch.removesuffix("f") for arch in found.keys() & {*code.architectures}]
            cubins += self._extract(path, "elf", "cubin", ours)
            ptx = [one.removeprefix(_PTX) for one in found if one.startswith(_PTX)]
            jit = [arch for arch in ptx if compiles(arch, device)]
            for text in self._extract(path, "ptx", "ptx", jit):
                entries.update(_ENTRY.findall(text.read_text(errors="replace")))
        largest_first = sorted(cubins, key=lambda path: -path.stat().st_size)
        read = in_parallel(lambda cubin, _: self.read(cubin), largest_first, width(_GIB))
        kernels = {(kernel.name, kernel.code): kernel for found in read for kernel in found}
        jitted = sorted(entries - {name for name, _ in kernels})
        return Library(images, tuple(kernels[key] for key in sorted(kernels)), tuple(jitted))

    def _images(self, path: Path) -> Counter[str]:
        """Return the number of cubins with a kernel, and of PTX texts; see ``Library.images``."""
        try:
            usage = self._run("-all", "--dump-resource-usage", path)
        except CommandError as error:
            if "does not contain device code" in str(error):
                return Counter()
            raise CheckError(f"{path.name}: {error.what}", "check that it is complete") from error
        pieces = _IMAGE.split(usage)
        if usage and len(pieces) == 1:  # a single cubin
            listed = self._run("-lelf", path)
            return Counter(re.findall(r"\.sm_(\w+)\.cubin$", listed, re.MULTILINE))
        found = zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True)
        return Counter(
            _PTX + arch if form == "ptx" else arch
            for form, arch, text in found
            if form == "ptx" or " Function " in text
        )

    def _extract(self, path: Path, form: str, suffix: str, archs: Sequence[str]) -> list[Path]:
        """Extract the images of a library for architectures."""
        if not archs:
            return []
        into = path.with_name(f"{path.name}.{suffix}s")
        into.mkdir()
        names = ",".join(f".sm_{arch}.{suffix}" for arch in sorted(archs))
        self._run("-all", f"-x{form}", names, path, cwd=into)
        return sorted(into.iterdir())


class Problem(NamedTuple):
    """A broken rule of docs/kernels.md; ``kernel``: its mangled name, "" for the whole library."""

    rule: str
    kernel: str
    text: str


def check(file: str, library: Library, contract: Contract, capability: str) -> Iterator[Problem]:
    """Yield the rules that a library breaks; none if the target does not use it."""
    rules = contract.rules(file)
    if rules.unused is not None:
        return
    if not library.kernels and not library.jit:
        archs = ", ".join(sorted(library.images))
        yield Problem("loads", "", f"has code for {archs}: nothing of it runs on {capability}")
    for name in library.jit:
        if not _excused(name, rules.jit):
            yield Problem("native", name, f"is in PTX only: compiled at run time on {capability}")
    for need in rules.needs:
        named = [kernel for kernel in library.kernels if re.search(need.kernels, kernel.name)]
        if len(named) < need.least:
            yield Problem("mma", "", f"has {len(named)} kernels {need.kernels}, not {need.least}")
        for kernel in named:
            if not any(re.fullmatch(need.mma, word) for word in kernel.mma):
                has = ", ".join(kernel.mma) or "no others"
                yield Problem("mma", kernel.name, f"has no {need.mma} (but {has})")
    stack = contract.stack if rules.stack is None else rules.stack
    for kernel in library.kernels:
        name = kernel.name
        stub = kernel.traps and not any(map(_WORK.fullmatch, kernel.opcodes))
        if stub and not _excused(name, rules.stubs):
            yield Problem("stub", name, "only traps: an empty stub")
        if foreign := [word for word in kernel.opcodes if re.fullmatch(contract.foreign, word)]:
            yield Problem("foreign", name, f"uses {', '.join(foreign)}, which the device lacks")
        for limit, value, most in (
            ("registers", kernel.registers, contract.registers),
            ("stack", kernel.stack, stack),
            ("shared", kernel.shared, contract.shared),
        ):
            if value > most:
                yield Problem(limit, name, f"{limit}: {value}, the limit is {most}")


def _excused(name: str, exceptions: Sequence[Excused]) -> bool:
    return any(re.search(exception.kernels, name) for exception in exceptions)


def _libraries(
    store: Store, wheel: Path, target: Target, readers: Readers
) -> Iterator[tuple[str, Library]]:
    """Yield the files of a wheel with machine code; a folder's cubins are one (``FOLDER/*.cubin``).

    BuildError: it is not a wheel, or a file differs from its RECORD.
    """
    intake.take(store, wheel, sha256_file(wheel))
    with store.temporary("proofs") as work:
        groups: dict[str, list[Path]] = {}
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(filter(_NATIVE.search, archive.namelist())):
                name = re.sub(r"[^/]*\.(cubin|fatbin)$", "*.cubin", member)
                groups.setdefault(name, []).append(Path(archive.extract(member, work)))
        for name, paths in groups.items():
            library = readers.library(paths, target)
            if library.images:
                yield name, library


@command_options
class Options(StoreOptions):
    wheel: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)] = ()
    """wheels to check (default: those of the target's last build)"""
    target: str
    """target whose contract in pins.yaml applies"""


def run(options: Options) -> int:
    """Read wheels, compare them with the target's contract, and write the report.

    CheckError: a rule is broken; the report is written.
    """
    project = Project.open(options.project)
    target = project.pins.target(options.target)
    code, capability = target.machine_code, target.cuda_arch
    if code is None or capability is None:
        msg = f"{options.target}: pins.yaml has no machine_code for this target"
        raise UsageError(msg, "use a target with a GPU")
    built = project.root / "dist" / options.target
    wheels = options.wheel or sorted((*built.glob("*.whl"), *built.glob("packs/*.whl")))
    if not wheels or not all(path.is_file() for path in wheels):
        msg = f"no such wheels: {', '.join(map(str, wheels)) or built}"
        hint = f"run build.py --target {options.target} --until wheels, or name wheels"
        raise UsageError(msg, hint)
    project.store.sweep()
    readers = Readers(project)
    contract, found = project.pins.contracts[code.contract], []
    for wheel in wheels:
        log.heading(f"{wheel.name}: machine code for {capability}")
        for file, library in _libraries(project.store, wheel, target, readers):
            problems = list(check(file, library, contract, capability))
            unused, kernels = contract.rules(file).unused or "", library.kernels
            mma = sum((Counter(kernel.mma) for kernel in kernels), Counter[str]())
            row = {"wheel": wheel.name, "file": file, "unused": unused, "images": library.images}
            broken = [problem._asdict() for problem in problems]
            found.append({**row, "kernels": len(kernels), "mma": mma, "problems": broken})
            verdict = "unused" if unused else "FAILED" if problems else "ok"
            log.info(f"  {verdict:6}  {file}: {len(kernels)} kernels")
            for problem in problems[:_SHOWN]:
                log.info(f"          {problem.rule}: {problem.kernel[:60]} {problem.text}")
    failed = sorted({str(one["wheel"]) for one in found if one["problems"]})
    report = {"target": options.target, "capability": capability, "ok": not failed}
    report |= {"wheels": [wheel.name for wheel in wheels], "libraries": found}
    path = project.root / "dist" / "proofs" / f"wheels-{options.target}.json"
    write_file(path, f"{json.dumps(report, indent=1, sort_keys=True)}\n".encode())
    log.heading(f"{len(wheels) - len(failed)} of {len(wheels)} wheels keep the contract; {path}")
    if failed:
        raise CheckError(f"failed: {', '.join(failed)}", f"see {path}")
    log.document(report)
    return 0
