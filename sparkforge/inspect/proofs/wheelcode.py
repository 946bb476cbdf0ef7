"""A wheel → the machine code in its files, as facts in the store; each file is read once."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from sparkforge.build.jobs import width
from sparkforge.core.errors import CommandError, ProofError
from sparkforge.core.hashing import code_digest, key_of, sha256_file
from sparkforge.core.log import log
from sparkforge.core.parallel import in_parallel
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.toolchain import Readers, keep
from sparkforge.pins.contracts import compiles
from sparkforge.store.codekey import code_of
from sparkforge.store.store import Store
from sparkforge.wheels import archive, intake

_NATIVE = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin|a|o|pyd)$")
_CUBIN = re.compile(r"\.(cubin|fatbin)$")
_READER_GIB = 1.5  # an image of 19 MB takes 0.55 here, and as much in cuobjdump
# the modules that decide the facts, in addition to this one
_READ_WITH = ("sparkforge.inspect.proofs.sass", "sparkforge.pins.architectures")
_NONE = "does not contain device code"
# cuobjdump -all --dump-resource-usage: one of these for each image, followed by its functions
_IMAGE = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", re.MULTILINE)
_FUNCTION = re.compile(r"^ Function (\S+):$", re.MULTILINE)
_MAGIC = (b"\x7fELF", b"!<arch>", b"\x50\xed\x55\xba")  # an object, an archive, a fatbin
_NAMED = re.compile(r"^(?:ELF|PTX) file +\d+: (\S+)$", re.MULTILINE)
_LISTED = re.compile(r"\.sm_(\w+)\.cubin$", re.MULTILINE)
_ENTRY = re.compile(rb"\.entry\s+([\w$.]+)")


@dataclass(frozen=True)
class Device:
    """The device of machine code.

    Attributes:
        capability: e.g. ``12.1``.
        architectures: of its own code, e.g. ``120f``.
    """

    capability: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class ImageResult:
    """The kernels of one cubin."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class CodeResult:
    """Machine code of a library.

    Attributes:
        images: number of cubins by architecture.
        ptx: number of PTX texts by architecture.
        kernels: of the cubins for the device, each content once.
        jit: kernels in no such cubin, which the driver compiles from PTX.
        absent: kernels of other architectures, missing for the device in both forms.
    """

    images: Mapping[str, int]
    ptx: Mapping[str, int]
    kernels: tuple[Kernel, ...]
    jit: tuple[str, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """A file of a wheel with machine code, or all cubins of one folder (``FOLDER/*.cubin``)."""

    file: str
    code: CodeResult


@dataclass(frozen=True)
class Reading:
    """The tools for reading machine code.

    Attributes:
        jobs: number of parallel readers.
    """

    device: Device
    readers: Readers
    store: Store
    jobs: int


def reading(device: Device, readers: Readers, store: Store, jobs: int | None) -> Reading:
    """Return the tools for reading; without a number, with as many jobs as memory allows."""
    return Reading(device, readers, store, width(jobs, _READER_GIB))


def libraries(wheel: Path, how: Reading) -> list[Library]:
    """Read the machine code of a wheel.

    Raises:
        WheelError: it is not a wheel, or a file differs from its RECORD.
        ProofError: machine code can't be read.
    """
    found = []
    with archive.opened(wheel) as source:
        record = intake.read(source).record
        groups: dict[str, list[str]] = {}
        for member in sorted(filter(_NATIVE.search, source.members)):
            folder = member.rpartition("/")[0]
            name = f"{folder}/*.cubin" if _CUBIN.search(member) else member
            groups.setdefault(name, []).append(member)
        for name, members in groups.items():
            code = _stored(source, record, name, members, how)
            if code.images or code.ptx:
                found.append(Library(name, code))
    return found


def _stored(
    source: archive.Source,
    record: Mapping[str, str],
    name: str,
    members: Sequence[str],
    how: Reading,
) -> CodeResult:
    if unsigned := [member for member in members if not record.get(member)]:
        raise source.wrong(f"{unsigned[0]} has no hash in its RECORD")
    files = sorted(record[member] for member in members)
    inputs = {
        "files": files,
        "capability": how.device.capability,
        "architectures": how.device.architectures,
        "readers": how.readers.identity,
        "code": [code_digest(Path(__file__)), *map(code_of, _READ_WITH)],
    }

    def make(folder: Path) -> CodeResult:
        paths = []
        for number, member in enumerate(members):
            paths.append(folder / f"{number}.{member.rpartition('/')[2]}")
            with paths[-1].open("wb") as out:
                out.writelines(intake.checked(source, record, member))
        code = _read(name, paths, how, folder)
        for path in paths:
            path.unlink()
        return code

    label = f"wheel code {key_of({'files': files})[:12]} {how.device.capability}"
    return keep(how.store, "proof-wheels", label, inputs, CodeResult, make).result


def _read(name: str, paths: Sequence[Path], how: Reading, folder: Path) -> CodeResult:
    images, ptx = Counter[str](), Counter[str]()
    names: set[str] = set()
    todo: list[Path] = []
    texts: list[Path] = []
    for path in paths:
        with path.open("rb") as file:
            if not file.read(8).startswith(_MAGIC):
                continue  # for example a linker's script
        sections = _sections(name, path, how.readers)
        names.update(kernel for section in sections for kernel in section.kernels)
        images.update(
            section.arch for section in sections if section.form == "elf" and section.kernels
        )
        ptx.update(section.arch for section in sections if section.form == "ptx")
        extract = partial(_extracted, how.readers, name, path, folder, sections)
        listed = {section.arch for section in sections if section.form == "elf" and section.kernels}
        todo += extract("elf", listed & {*how.device.architectures})
        jit = {section.arch for section in sections if section.form == "ptx"}
        texts += extract("ptx", {arch for arch in jit if compiles(arch, how.device.capability)})
    kernels = {
        (kernel.name, kernel.code): kernel for image in _images(name, todo, how) for kernel in image
    }
    native = {kernel for kernel, _ in kernels}
    compiled = {entry for text in texts for entry in _entries(text)} - native
    return CodeResult(
        dict(sorted(images.items())),
        dict(sorted(ptx.items())),
        tuple(kernels[key] for key in sorted(kernels)),
        tuple(sorted(compiled)),
        tuple(sorted(names - native - compiled)),
    )


@dataclass(frozen=True)
class _Section:
    """An image in cuobjdump's listing; a device linker's has no kernel."""

    form: str
    arch: str
    kernels: tuple[str, ...]


def _sections(name: str, path: Path, readers: Readers) -> list[_Section]:
    usage = _dump(readers, name, "--dump-resource-usage", path)
    pieces = _IMAGE.split(usage)
    if usage and len(pieces) == 1:  # a single cubin
        (arch,) = _LISTED.findall(_dump(readers, name, "-lelf", path))
        return [_Section("elf", arch, tuple(_FUNCTION.findall(usage)))]
    found = zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True)
    return [_Section(form, arch, tuple(_FUNCTION.findall(text))) for form, arch, text in found]


def _images(name: str, cubins: Sequence[Path], how: Reading) -> list[tuple[Kernel, ...]]:
    """Read cubins in parallel; an interrupted run continues with the unread ones."""

    def read(path: Path, stopping: Event) -> tuple[Kernel, ...]:
        def facts(_: Path) -> ImageResult:
            try:
                return ImageResult(tuple(how.readers.read(path)))
            except ProofError as error:
                raise ProofError(f"{name}: {error.what}", error.remedy) from error

        inputs = {
            "cubin": sha256_file(path),
            "readers": how.readers.identity,
            "code": code_of(_READ_WITH[0]),
        }
        # not recorded as the newest: the library's own record has all of it
        kernels = how.store.build("proof-images", inputs, ImageResult, facts).result.kernels
        path.unlink()
        return kernels

    largest_first = sorted(cubins, key=lambda path: -path.stat().st_size)
    found = []
    for kernels in in_parallel(read, largest_first, how.jobs):
        found.append(kernels)
        log.progress(name.rpartition("/")[2], len(found), len(cubins), "")
    return found


def _dump(readers: Readers, name: str, what: str, path: Path) -> str:
    """Return cuobjdump's output for all images of a file; "" without images.

    Raises:
        ProofError: it can't be read.
    """
    try:
        return readers.run("-all", what, path)
    except CommandError as error:
        if _NONE in str(error):
            return ""
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: CommandError) -> ProofError:
    msg = f"{name}: its machine code can't be read:\n{error}"
    return ProofError(msg, "check that the file is complete")


def _extracted(
    readers: Readers,
    name: str,
    path: Path,
    folder: Path,
    sections: Sequence[_Section],
    form: str,
    archs: set[str],
) -> list[Path]:
    """Extract the images of some architectures to their own folder.

    Raises:
        ProofError: cuobjdump fails, or does not extract all listed images.
    """
    if not archs:
        return []
    into = folder / f"{path.name}.{form}"
    into.mkdir()
    ends = tuple(sorted({_ending(form, arch) for arch in archs}))
    try:
        readers.run("-all", f"-x{form}", ",".join(ends), path, cwd=into)
    except CommandError as error:
        raise _unreadable(name, error) from error
    found = sorted(into.iterdir())
    count = sum(
        section.form == form and _ending(form, section.arch) in ends for section in sections
    )
    if len(found) != count:
        every = _NAMED.findall(_dump(readers, name, f"-l{form}", path))
        left = Counter(file for file in every if file.endswith(ends))
        left.subtract(file.name for file in found)
        msg = (
            f"{name}: cuobjdump lists {count} images (*{', *'.join(ends)}) and extracts"
            f" {len(found)}; missing: {', '.join(sorted(+left)) or 'unknown'}"
        )
        raise ProofError(msg, "check that the file is complete, and that the disk is not full")
    return found


def _ending(form: str, arch: str) -> str:
    """Return the end of cuobjdump's file names for an architecture; 120f's cubins have 120's."""
    return f".sm_{arch.removesuffix('f')}.cubin" if form == "elf" else f".sm_{arch}.ptx"


def _entries(ptx: Path) -> set[str]:
    with ptx.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        names = {match[1].decode() for match in _ENTRY.finditer(text)}
    ptx.unlink()
    return names
