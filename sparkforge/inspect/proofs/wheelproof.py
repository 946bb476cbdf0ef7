"""`build.py proofs --wheel`: wheels → machine code → the target's contract → dist/proofs/."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.build.options import host_platform
from sparkforge.core import pages
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import ProofError, UsageError, WheelError
from sparkforge.core.log import log
from sparkforge.inspect.proofs import contract, toolchain, wheelcode
from sparkforge.inspect.proofs.checks import short
from sparkforge.inspect.proofs.contract import Checked, Problem
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.wheelcode import Device
from sparkforge.pins.contracts import Contract
from sparkforge.pins.pins import Pins
from sparkforge.sources.project import Project

_SHOWN = 5  # kernels of a broken rule in the log; the report has all
_SCALED = re.compile(r"[QO]MMA\.SF\b.*")
_HEAD = (
    "Library",
    "Machine code for",
    "Kernels",
    "Block-scaled",
    "PTX only",
    "Absent",
    "Registers",
    "Stack, bytes",
    "Shared, bytes",
    "Verdict",
)
_NUMBERS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Proved:
    """A wheel and its libraries with machine code."""

    wheel: str
    libraries: tuple[Checked, ...]

    @property
    def problems(self) -> list[Problem]:
        """All problems of its libraries."""
        return [problem for library in self.libraries for problem in library.problems]


def agreed(pins: Pins, target: str | None) -> tuple[str, Contract, Device]:
    """Return the target's name, its contract, and its device.

    Raises:
        UsageError: no target is named, or it has no contract.
    """
    known = ", ".join(name for name, pinned in sorted(pins.targets.items()) if pinned.machine_code)
    if target is None:
        raise UsageError("--wheel needs --target", f"use one of: {known}")
    code, capability = pins.target(target).machine_code, pins.target(target).cuda_arch
    if code is None or capability is None:
        msg = f"{target}: pins.yaml has no machine_code for this target"
        raise UsageError(msg, f"use one of: {known}")
    return target, pins.contracts[code.contract], Device(capability, code.architectures)


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


def prove(
    project: Project, target: str | None, named: Sequence[Path], jobs: int | None
) -> dict[str, Any]:
    """Read wheels, compare them with the contract, and write the report.

    Raises:
        UsageError: the target has no contract, or a file is missing.
        WheelError: a file is no wheel.
        ProofError: a rule is broken; the report is written.
    """
    target, rules, device = agreed(project.pins, target)
    wheels = files(project, target, named)
    start = time.monotonic()
    readers = toolchain.readers(project.store, project.root, host_platform(), project.access)
    how = wheelcode.reading(device, readers, project.store, jobs)
    proved = []
    for path in wheels:
        log.heading(f"{path.name}: machine code for {device.capability}")
        try:
            libraries = wheelcode.libraries(path, how)
        except WheelError as error:
            raise WheelError(error.what, "name a complete, unchanged wheel") from None
        checked = tuple(contract.check(library, rules, device) for library in libraries)
        proved.append(Proved(path.name, checked))
        _tell(proved[-1])
    document = _document(target, device, proved)
    folder, name = project.root / "dist" / "proofs", f"wheels-{target}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        (folder / f"{name}.json").write_text(text)
        (folder / f"{name}.md").write_text(_markdown(target, device, proved))
    failed = [wheel.wheel for wheel in proved if wheel.problems]
    log.heading(
        f"{len(proved) - len(failed)} of {len(proved)} wheels keep the contract, in"
        f" {time.monotonic() - start:.0f} s; dist/proofs/{name}.md"
    )
    if failed:
        raise ProofError(f"failed: {', '.join(failed)}", f"see dist/proofs/{name}.md")
    return document


def _tell(proved: Proved) -> None:
    if not proved.libraries:
        log.info("  has no machine code for GPUs")
    for library in proved.libraries:
        if library.unused:
            log.info(f"  unused  {library.library.file}: {library.unused}")
            continue
        count = len(library.library.code.kernels)
        log.info(
            f"  {'FAILED' if library.problems else 'ok':6}  {library.library.file}: {count} kernels"
        )
        for line in _lines(library.problems):
            log.info(f"          {line}")


def _lines(problems: Sequence[Problem]) -> list[str]:
    """Return the problems by rule, a few kernels of each."""
    lines = []
    for rule, count in Counter(problem.rule for problem in problems).items():
        of_rule = [problem for problem in problems if problem.rule == rule]
        for problem in of_rule[:_SHOWN]:
            kernel = f"{short(problem.kernel)}: " if problem.kernel else ""
            lines.append(f"{rule}: {kernel}{problem.text}")
        if count > _SHOWN:
            lines.append(f"{rule}: and {count - _SHOWN} more kernels")
    return lines


# -- report ------------------------------------------------------------------------


def _document(target: str, device: Device, proved: Sequence[Proved]) -> dict[str, Any]:
    return {
        "target": target,
        "capability": device.capability,
        "ran_on": "no GPU: disassembled only",
        "ok": not any(wheel.problems for wheel in proved),
        "wheels": [
            {
                "wheel": wheel.wheel,
                "ok": not wheel.problems,
                "libraries": [
                    {
                        "file": checked.library.file,
                        "unused": checked.unused,
                        "images": dict(checked.library.code.images),
                        "ptx": dict(checked.library.code.ptx),
                        "kernels": len(checked.library.code.kernels),
                        "mma": _mma(checked.library.code.kernels),
                        "ptx_only": list(checked.library.code.jit),
                        "absent": list(checked.library.code.absent),
                        "problems": [asdict(problem) for problem in checked.problems],
                    }
                    for checked in wheel.libraries
                ],
            }
            for wheel in proved
        ],
    }


def _mma(kernels: Sequence[Kernel]) -> Mapping[str, int]:
    """Return the number of kernels with each matrix instruction."""
    return dict(sorted(Counter(word for kernel in kernels for word in kernel.mma).items()))


def _markdown(target: str, device: Device, proved: Sequence[Proved]) -> str:
    return pages.render(
        Path(__file__).with_name("wheels.md.j2"),
        target=target,
        capability=device.capability,
        head=_HEAD,
        right=_NUMBERS,
        wheels=[(wheel.wheel, [_row(library) for library in wheel.libraries]) for wheel in proved],
        problems=[
            (library.library.file, _lines(library.problems))
            for wheel in proved
            for library in wheel.libraries
            if library.problems
        ],
    )


def _row(library: Checked) -> tuple[str, ...]:
    code = library.library.code
    scaled = sum(any(_SCALED.fullmatch(word) for word in kernel.mma) for kernel in code.kernels)
    forms = [f"{arch} ({count})" for arch, count in code.images.items()]
    forms += [f"PTX {arch} ({count})" for arch, count in code.ptx.items()]
    broken = Counter(problem.rule for problem in library.problems)
    return (
        f"`{library.library.file}`",
        ", ".join(forms),
        f"{len(code.kernels):,}",
        f"{scaled:,}",
        f"{len(code.jit):,}",
        f"{len(code.absent):,}",
        str(max((kernel.registers for kernel in code.kernels), default=0)),
        f"{max((kernel.stack + kernel.local for kernel in code.kernels), default=0):,}",
        f"{max((kernel.shared for kernel in code.kernels), default=0):,}",
        ", ".join(f"{rule}: {count}" for rule, count in broken.items())
        or ("not used" if library.unused else "keeps it"),
    )
