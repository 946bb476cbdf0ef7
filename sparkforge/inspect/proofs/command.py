"""`build.py proofs`: options → verdicts → dist/proofs/."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.context import Context
from sparkforge.build.options import OutputOptions, host_platform
from sparkforge.core import pages
from sparkforge.core.command import Entry, argument, count, option, switch
from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import ProofError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.inspect.perf import kernelwork
from sparkforge.inspect.proofs import (
    report,
    runner,
    stagekernels,
    toolchain,
    triton_aot,
    units,
    wheelproof,
)
from sparkforge.pins.pins import Pins
from sparkforge.sources.project import Project, ProjectOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``proofs``."""

    names: tuple[str, ...] = argument(
        "proofs to run (default: all)", default=(), nargs="*", metavar="NAME"
    )
    ci: bool = switch("run the smallest sufficient set")
    list: bool = switch("list the proofs and exit")
    jobs: int | None = option(
        "parallel compilers (default: as many as fit in memory)", type=count, metavar="N"
    )
    record: bool = switch(
        "write what the decode kernels do into the checkout; `build.py docs` uses it"
    )
    wheel: tuple[Path, ...] | None = option(
        "check the machine code of wheels with the target's contract in pins.yaml (default: the"
        " wheels of its last build)",
        type=Path,
        nargs="*",
        metavar="FILE",
    )
    target: str | None = option("target whose contract applies", needs="--wheel", metavar="NAME")
    project: ProjectOptions
    output: OutputOptions


def run(options: Options) -> int:
    """Run the chosen proofs; write the report.

    Raises:
        ProofError: a proof fails.
        StaleError: the record of the decode kernels' work differs.
    """
    if options.wheel is not None:
        return _wheels(options, options.wheel)
    chosen = units.choose(options.names, ci=options.ci)
    if options.record and not any(unit.stage for unit in chosen):
        raise UsageError("--record needs the proof decode-kernels", "name it, or name none")
    if options.list:
        return _list(chosen, as_json=options.output.json)
    start = time.monotonic()
    project = Project.open(options.project)
    root, loaded, store, access = project.root, project.pins, project.store, project.access
    store.sweep()
    with_nvcc = [unit for unit in chosen if not (unit.triton or unit.stage)]
    nvcc = toolchain.nvcc_identity() if with_nvcc else ""
    readers = toolchain.readers(store, root, host_platform(), access)
    trees = {
        name: runner.patched_tree(store, root, name, loaded.upstream(name), access)
        for name in sorted({unit.upstream for unit in chosen if unit.upstream is not None})
    }
    todo = runner.jobs(with_nvcc, trees, store)
    at_once = runner.width(options.jobs)
    verdicts, works = [], []
    if with_nvcc:
        log.heading(f"{counted(len(todo), 'unit')} to prove, {at_once} at once, with nvcc {nvcc}")
        verdicts += runner.prove(store, todo, trees, readers, at_once)
    for unit in chosen:
        if unit.stage:
            found = stagekernels.read(project, readers)
            for verdict in stagekernels.prove(found, unit):
                verdicts.append(verdict)
                runner.tell(verdict)
            works.append(kernelwork.of(found))
    left_out = []
    for unit in chosen:
        if unit.triton and (why := _no_triton(loaded)):
            log.warning(f"{unit.name}: skipped: {why}")
            left_out.append({"unit": unit.name, "why": why})
        elif unit.triton:
            context = Context.of(project, triton_aot.TARGET, host_platform())
            for verdict in triton_aot.prove(context, unit, readers):
                verdicts.append(verdict)
                runner.tell(verdict)
    document = report.document(verdicts, nvcc) | {"left_out": left_out}
    folder = root / "dist" / "proofs"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        (folder / "report.json").write_text(text)
        (folder / "report.md").write_text(report.markdown(verdicts, nvcc))
    failed = [verdict.job.label for verdict in verdicts if not verdict.ok]
    log.heading(
        f"{len(verdicts) - len(failed)} of {len(verdicts)} proofs pass, in"
        f" {time.monotonic() - start:.0f} s; dist/proofs/report.md"
    )
    if failed:
        raise ProofError(f"failed: {', '.join(failed)}", "see dist/proofs/report.md")
    for work in works:
        _settle(work, record=options.record)
    log.document(document)
    return 0


def _wheels(options: Options, wheels: tuple[Path, ...]) -> int:
    """Check the machine code of wheels.

    Raises:
        UsageError: other options are for proofs of units, or no target is named.
        ProofError, WheelError: as ``wheelproof.prove``.
    """
    if options.names or options.ci or options.list or options.record:
        msg = "--wheel takes no NAME, --ci, --list or --record"
        raise UsageError(msg, "run the proofs of units by themselves")
    project = Project.open(options.project)
    project.store.sweep()
    document = wheelproof.prove(project, options.target, wheels, options.jobs)
    if options.output.json:
        log.json(document)
    return 0


def _settle(found: kernelwork.Recorded, *, record: bool) -> None:
    """Write the record of the decode kernels' work, or compare it."""
    wanted = {kernelwork.FILE: kernelwork.text(found)}
    for path in pages.settle(wanted, kernelwork.COMMAND, check=not record):
        log.info(f"{path}: written")


def _no_triton(loaded: Pins) -> str:
    """Return the reason why Triton cannot run here, or ""."""
    target = loaded.target(triton_aot.TARGET)
    here = host_platform()
    if here in target.platforms:
        return ""
    return f"the {triton_aot.TARGET} target, whose Python runs Triton, is not for {here}"


def _list(chosen: list[units.Unit], *, as_json: bool) -> int:
    if as_json:
        log.json(
            {
                unit.name: {
                    "summary": unit.summary,
                    "archs": list(unit.archs),
                    "ci": list(unit.ci),
                    "control": unit.control,
                }
                for unit in chosen
            }
        )
        return 0
    for unit in chosen:
        log.info(f"{unit.name}  [{' '.join(unit.archs)}]")
        log.info(f"    {unit.summary}")
    return 0


COMMANDS = (Entry("proofs", Options, run),)
