"""A wheel → the machine code in its files, as facts in the store; each file is read once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from sparkforge.build.jobs import width
from sparkforge.check.proofs.cuobjdump import Readers
from sparkforge.check.proofs.machinecode import Kernel
from sparkforge.core.disk import key_of
from sparkforge.core.errors import CheckError, CommandError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.pins.compiling import compiles
from sparkforge.store.store import Store, code_of
from sparkforge.wheels import archive, intake

_NATIVE = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin|a|o|pyd)$")
_CUBIN = re.compile(r"\.(cubin|fatbin)$")
_READER_GIB = 1.5  # an image of 19 MB takes 0.55 here, and as much in cuobjdump
_NONE = "does not contain device code"
# cuobjdump -all --dump-resource-usage: one of these for each image, followed by its functions
_IMAGE = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", re.MULTILINE)
_FUNCTION = re.compile(r"^ Function (\S+):$", re.MULTILINE)
_MAGIC = (b"\x7fELF", b"!<arch>", b"\x50\xed\x55\xba")  # an object, an archive, a fatbin
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
class CodeResult:
    """Machine code of a library.

    Attributes:
        images: number of cubins by architecture.
        ptx: number of PTX texts by architecture.
        kernels: of the cubins for the device, each content once.
        jit: kernels in no such cubin, which the driver compiles from PTX.
    """

    images: Mapping[str, int]
    ptx: Mapping[str, int]
    kernels: tuple[Kernel, ...]
    jit: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """A file of a wheel with machine code, or all cubins of a folder (``FOLDER/*.cubin``)."""

    file: str
    code: CodeResult


def libraries(
    wheel: Path, device: Device, readers: Readers, store: Store, jobs: int | None
) -> list[Library]:
    """Read the machine code of a wheel.

    Args:
        jobs: images read at once; None: as many as memory allows.

    Raises:
        BuildError: it is not a wheel, or a file differs from its RECORD.
        CheckError: machine code can't be read.
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
            if unsigned := [member for member in members if not record.get(member)]:
                raise source.wrong(f"{unsigned[0]} has no hash in its RECORD")

            def make(
                folder: Path, name: str = name, members: Sequence[str] = members
            ) -> CodeResult:
                paths = []
                for number, member in enumerate(members):
                    paths.append(folder / f"{number}.{member.rpartition('/')[2]}")
                    with paths[-1].open("wb") as out:
                        out.writelines(intake.checked(source, record, member))
                code = _Reader(name, device, readers, folder, width(jobs, _READER_GIB)).read(paths)
                for path in paths:
                    path.unlink()
                return code

            files = sorted(record[member] for member in members)
            inputs = {
                "files": files,
                "capability": device.capability,
                "architectures": device.architectures,
                "readers": readers.identity,
                "code": code_of(__name__),
            }
            made = store.build("proof-wheels", inputs, CodeResult, make)
            label = f"wheel code {key_of({'files': files})[:12]} {device.capability}"
            store.remember("proofs", label, made)
            if made.result.images or made.result.ptx:
                found.append(Library(name, made.result))
    return found


@dataclass(frozen=True)
class _Reader:
    """Reads the files of a library, in a folder of its own."""

    name: str
    device: Device
    readers: Readers
    folder: Path
    jobs: int

    def read(self, paths: Sequence[Path]) -> CodeResult:
        images, ptx = Counter[str](), Counter[str]()
        cubins: list[Path] = []
        entries: set[str] = set()
        for path in paths:
            with path.open("rb") as file:
                if not file.read(8).startswith(_MAGIC):
                    continue  # for example a linker's script
            here = {"elf": Counter[str](), "ptx": Counter[str]()}
            for form, arch in self._sections(path):
                here[form][arch] += 1
            images.update(here["elf"])
            ptx.update(here["ptx"])
            ours = here["elf"].keys() & {*self.device.architectures}
            jit = {arch for arch in here["ptx"] if compiles(arch, self.device.capability)}
            cubins += self._extract("elf", path, ours, here["elf"])
            for text in self._extract("ptx", path, jit, here["ptx"]):
                entries.update(match.decode() for match in _ENTRY.findall(text.read_bytes()))
                text.unlink()
        kernels: dict[tuple[str, str], Kernel] = {}
        largest_first = sorted(cubins, key=lambda path: -path.stat().st_size)
        for done, found in enumerate(in_parallel(self._kernels, largest_first, self.jobs), 1):
            kernels.update({(kernel.name, kernel.code): kernel for kernel in found})
            log.progress(self.name.rpartition("/")[2], done, len(cubins), "")
        native = {name for name, _ in kernels}
        return CodeResult(
            dict(sorted(images.items())),
            dict(sorted(ptx.items())),
            tuple(kernels[key] for key in sorted(kernels)),
            tuple(sorted(entries - native)),
        )

    def _kernels(self, cubin: Path, stopping: Event) -> list[Kernel]:
        try:
            return self.readers.read(cubin)
        except CheckError as error:
            raise CheckError(f"{self.name}: {error.what}", error.remedy) from error
        finally:
            cubin.unlink()

    def _run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Return cuobjdump's output for all images of a file; "" without images."""
        try:
            return self.readers.run("-all", *words, cwd=cwd)
        except CommandError as error:
            if _NONE in str(error):
                return ""
            msg = f"{self.name}: its machine code can't be read:\n{error}"
            raise CheckError(msg, "check that the file is complete") from error

    def _sections(self, path: Path) -> list[tuple[str, str]]:
        """Return form (elf, ptx) and architecture of each image with a kernel."""
        usage = self._run("--dump-resource-usage", path)
        pieces = _IMAGE.split(usage)
        if usage and len(pieces) == 1:  # a single cubin
            (arch,) = _LISTED.findall(self._run("-lelf", path))
            return [("elf", arch)]
        found = zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True)
        return [
            (form, arch) for form, arch, text in found if form == "ptx" or _FUNCTION.search(text)
        ]

    def _extract(
        self, form: str, path: Path, archs: set[str], listed: Mapping[str, int]
    ) -> list[Path]:
        """Extract the images of some architectures to a folder.

        Raises:
            CheckError: cuobjdump fails, or does not extract all listed images.
        """
        if not archs:
            return []
        into = self.folder / f"{path.name}.{form}"
        into.mkdir()
        # by the ends of cuobjdump's file names; 120f's cubins have 120's
        ends = {
            arch: f".sm_{arch.removesuffix('f')}.cubin" if form == "elf" else f".sm_{arch}.ptx"
            for arch in listed
        }
        wanted = sorted({ends[arch] for arch in archs})
        self._run(f"-x{form}", ",".join(wanted), path, cwd=into)
        found = sorted(into.iterdir())
        count = sum(number for arch, number in listed.items() if ends[arch] in wanted)
        if len(found) < count:
            msg = f"{self.name}: cuobjdump lists {count} images (*{', *'.join(wanted)})"
            hint = "check that the file is complete, and that the disk is not full"
            raise CheckError(f"{msg} and extracts {len(found)}", hint)
        return found
