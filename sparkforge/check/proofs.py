"""`build.py proofs`: machine code of a target's wheels, compared with its contract of pins.yaml."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions, command_options
from sparkforge.check.machinecode import Library, Readers, readers
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.pins import Target
from sparkforge.pins.types import Contract, Excused
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.wheels import archive, intake

_NATIVE = re.compile(r"\.so(\.\d+)*$|\.(cubin|fatbin|a|o|pyd)$")
# a stub at most reads constants, and stops; an assertion's trap comes with other work
_WORK = re.compile(r"LD[GSL]?|LDSM|LDGSTS|ST[GSL]?|ATOM\w*|RED\w*|UTMA\w*|UBLK\w*")
_SHOWN = 5  # problems of a library in the log; the report has all


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
        archs = ", ".join(sorted({*library.images, *library.ptx}))
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
            ("stack", kernel.stack + kernel.local, stack),
            ("shared", kernel.shared, contract.shared),
        ):
            if value > most:
                yield Problem(limit, name, f"{limit}: {value}, the limit is {most}")


def _excused(name: str, exceptions: Sequence[Excused]) -> bool:
    return any(re.search(exception.kernels, name) for exception in exceptions)


def libraries(
    wheel: Path, target: Target, tools: Readers, work: Path
) -> Iterator[tuple[str, Library]]:
    """Yield the files of a wheel with machine code; a folder's cubins are one (``FOLDER/*.cubin``).

    BuildError: it is not a wheel, or a file differs from its RECORD.
    """
    code = target.machine_code
    assert code is not None and target.cuda_arch is not None
    with archive.opened(wheel) as source:
        record = intake.read(source).record
        groups: dict[str, list[str]] = {}
        for member in sorted(filter(_NATIVE.search, source.members)):
            name = re.sub(r"[^/]*\.(cubin|fatbin)$", "*.cubin", member)
            groups.setdefault(name, []).append(member)
        for number, (name, members) in enumerate(groups.items()):
            folder = work / str(number)
            folder.mkdir()
            paths = []
            for member in members:
                paths.append(folder / member.rpartition("/")[2])
                with paths[-1].open("wb") as out:
                    out.writelines(intake.checked(source, record, member))
            library = tools.library(paths, target.cuda_arch, code.architectures, folder)
            shutil.rmtree(folder)
            if library.images or library.ptx:
                yield name, library


@command_options
class Options:
    """Options of ``proofs``."""

    wheel: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)] = ()
    """wheels to check (default: those of the target's last build)"""
    target: str
    """target whose contract in pins.yaml applies"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


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
    tools = readers(project)
    contract, found = project.pins.contracts[code.contract], []
    for wheel in wheels:
        log.heading(f"{wheel.name}: machine code for {capability}")
        with project.store.temporary("proofs") as work:
            for file, library in libraries(wheel, target, tools, work):
                problems = list(check(file, library, contract, capability))
                unused, kernels = contract.rules(file).unused or "", library.kernels
                one = {
                    "wheel": wheel.name,
                    "file": file,
                    "unused": unused,
                    "images": library.images,
                    "ptx": library.ptx,
                    "kernels": len(kernels),
                    "mma": sum((Counter(kernel.mma) for kernel in kernels), Counter()),
                    "problems": [problem._asdict() for problem in problems],
                }
                found.append(one)
                verdict = "unused" if unused else "FAILED" if problems else "ok"
                log.info(f"  {verdict:6}  {file}: {len(kernels)} kernels")
                for problem in problems[:_SHOWN]:
                    log.info(f"          {problem.rule}: {problem.kernel[:60]} {problem.text}")
                if len(problems) > _SHOWN:
                    log.info(f"          and {len(problems) - _SHOWN} more problems")
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
