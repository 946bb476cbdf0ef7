"""`build.py proofs`: machine code of a target's wheels → its contract → dist/proofs/."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from sparkforge.build.options import OutputOptions, host_platform
from sparkforge.check.proofs import contract, cuobjdump, wheelcode
from sparkforge.check.proofs.contract import Problem
from sparkforge.check.proofs.wheelcode import Device, Library
from sparkforge.core.disk import write_file
from sparkforge.core.errors import BuildError, CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.sources.project import Project, ProjectOptions

_SHOWN = 5  # kernels of a broken rule in the log; the report has all


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``proofs``."""

    wheel: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)] = ()
    """wheels to check (default: those of the target's last build)"""
    target: str
    """target whose contract in pins.yaml applies"""
    jobs: PositiveInt | None = None
    """images read in parallel (default: as many as fit in memory)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Read wheels, compare them with the target's contract, and write the report.

    Raises:
        UsageError: the target has no contract, or a file is missing.
        BuildError: a file is no wheel.
        CheckError: a rule is broken; the report is written.
    """
    project = Project.open(options.project)
    target, pins = options.target, project.pins
    code, capability = pins.target(target).machine_code, pins.target(target).cuda_arch
    if code is None or capability is None:
        known = sorted(name for name, pinned in pins.targets.items() if pinned.machine_code)
        msg = f"{target}: pins.yaml has no machine_code for this target"
        raise UsageError(msg, f"use one of: {', '.join(known)}")
    rules, device = pins.contracts[code.contract], Device(capability, code.architectures)
    wheels = files(project, target, options.wheel)
    project.store.sweep()
    readers = cuobjdump.readers(project.store, project.root, host_platform(), project.access)
    found, failed = [], set()
    for path in wheels:
        log.heading(f"{path.name}: machine code for {capability}")
        try:
            read = wheelcode.libraries(path, device, readers, project.store, options.jobs)
        except BuildError as error:
            raise BuildError(error.what, "name a complete, unchanged wheel") from None
        for library in read:
            problems = contract.check(library, rules, device)
            unused = rules.rules(library.file).unused or ""
            found.append(_document(path.name, library, unused, problems))
            if problems:
                failed.add(path.name)
            _tell(library, unused, problems)
    document = {
        "target": target,
        "capability": capability,
        "ran_on": "no GPU: disassembled only",
        "ok": not failed,
        "wheels": [path.name for path in wheels],
        "libraries": found,
    }
    report = project.root / "dist" / "proofs" / f"wheels-{target}.json"
    write_file(report, f"{json.dumps(document, indent=1, sort_keys=True)}\n".encode())
    log.heading(f"{len(wheels) - len(failed)} of {len(wheels)} wheels keep the contract; {report}")
    if failed:
        raise CheckError(f"failed: {', '.join(sorted(failed))}", f"see {report}")
    log.document(document)
    return 0


def files(project: Project, target: str, named: Sequence[Path]) -> list[Path]:
    """Return the wheels to read: the named ones, else those of the target's last build.

    Raises:
        UsageError: one is missing, or there is none.
    """
    for path in named:
        if not path.is_file():
            raise UsageError(f"--wheel: {path}: no such file", "name wheels: NAME.whl")
    built = project.root / "dist" / target
    found = list(named) or sorted((*built.glob("*.whl"), *built.glob("packs/*.whl")))
    if not found:
        hint = f"run build.py --target {target} --until wheels, or name wheels"
        raise UsageError(f"{built}: no wheels", hint)
    return found


def _document(
    wheel: str, library: Library, unused: str, problems: Sequence[Problem]
) -> dict[str, object]:
    code = library.code
    return {
        "wheel": wheel,
        "file": library.file,
        "unused": unused,
        "images": dict(code.images),
        "ptx": dict(code.ptx),
        "kernels": len(code.kernels),
        "mma": dict(sorted(Counter(word for one in code.kernels for word in one.mma).items())),
        "stack": max((one.stack + one.local for one in code.kernels), default=0),
        "ptx_only": list(code.jit),
        "problems": [asdict(problem) for problem in problems],
    }


def _tell(library: Library, unused: str, problems: Sequence[Problem]) -> None:
    if unused:
        log.info(f"  unused  {library.file}: {unused}")
        return
    verdict = "FAILED" if problems else "ok"
    log.info(f"  {verdict:6}  {library.file}: {len(library.code.kernels)} kernels")
    for rule, number in Counter(problem.rule for problem in problems).items():
        for problem in [one for one in problems if one.rule == rule][:_SHOWN]:
            log.info(f"          {rule}: {problem.kernel[:60]} {problem.text}")
        if number > _SHOWN:
            log.info(f"          {rule}: and {number - _SHOWN} more kernels")
