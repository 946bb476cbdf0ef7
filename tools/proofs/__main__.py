"""Run proofs: ``.venv/bin/python -m tools.proofs [NAME...]``, from .venv of the checkout."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from sparkforge.build import jobs
from sparkforge.build.options import host_platform
from sparkforge.check.perf import kernelrecord
from sparkforge.check.proofs import cuobjdump
from sparkforge.check.proofs.cuobjdump import Readers
from sparkforge.check.proofs.machinecode import Kernel
from sparkforge.core import git
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, CommandError, PinsError, SparkforgeError
from sparkforge.core.log import log
from sparkforge.core.run import call, in_parallel
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from tools.proofs import checks, decode, nvcc, units
from tools.proofs.units import Unit

_FOLDERS = ("csrc", "include", "3rdparty", "flashinfer/jit/gemm")
_GENERATE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module("cutlass.generate_kernels")
module.generate_gemm_operations(sys.argv[2], "120;120-real")
"""
_KERNEL = r"^\s*INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(Sm120, (\w+), (\w+),"


@dataclass(frozen=True)
class Job:
    """One source for one architecture, with the number of kernels that it must give."""

    unit: Unit
    label: str
    arch: str
    source: Path
    kernels: int | None


@dataclass(frozen=True)
class Verdict:
    """The result of a job: its kernels and problems, and the seconds of the compile."""

    label: str
    control: bool
    kernels: tuple[Kernel, ...]
    problems: tuple[str, ...]
    compile_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it passes; a control passes if the checks refuse it, and only as a stub."""
        if not self.control:
            return not self.problems
        return bool(self.problems) and all(checks.STUB in problem for problem in self.problems)


@contextmanager
def patched_tree(project: Project) -> Iterator[Path]:
    """Yield FlashInfer's patched tree, unpacked for a while.

    Raises:
        FetchError, IntegrityError, SeriesError: as for a build.
    """
    store, name = project.store, "flashinfer"
    upstream = project.pins.upstream(name)
    source = sources.ensure(store, name, upstream, RELEASE_PLAN, project.access)
    patches = series.read(project.root / "patches" / name)
    patched = series.apply_recorded(store, patches, source, upstream)
    with store.temporary("proofs") as work:
        git.unpack(source.repo, patched.commit, _FOLDERS, work / "tree")
        yield work / "tree"


def jobs_of(unit: Unit, tree: Path | None, work: Path) -> list[Job]:
    """Return the jobs of a unit; FlashInfer's generator writes the sources of some.

    Raises:
        CheckError: it writes no file for the unit.
    """
    found: dict[str, tuple[Path, int | None]] = {}
    if unit.generated is not None:
        assert tree is not None
        folder = work / unit.name
        folder.mkdir()
        call(sys.executable, "-I", "-c", _GENERATE, tree / _FOLDERS[-1], folder)
        for path in sorted(folder.rglob("gemm_grouped/120/**/*.generated.cu")):
            kernels = re.findall(_KERNEL, path.read_text(encoding="utf-8"), re.MULTILINE)
            if set(kernels) == {unit.generated}:
                short = path.name.partition(".")[0].rpartition("sm120_")[2]
                found[f"{unit.name}/{short}"] = path, len(kernels)
        if not found:
            msg = f"{unit.name}: FlashInfer's generator creates no kernel of {unit.generated}"
            raise CheckError(msg, "apply the series that adds them, or update the unit")
    elif unit.text is not None:
        path = work / f"{unit.name}.cu"
        path.write_text(unit.text, encoding="utf-8")
        found[unit.name] = path, unit.promise.kernels
    else:
        assert unit.file is not None
        found[unit.name] = (tree or nvcc.INCLUDE) / unit.file, unit.promise.kernels
    return [
        Job(unit, label, arch, path, count)
        for arch in unit.archs
        for label, (path, count) in found.items()
    ]


def prove(job: Job, tree: Path | None, readers: Readers, work: Path) -> Verdict:
    """Compile, read and check a job.

    Raises:
        CheckError: nvcc fails, or its machine code can't be read.
    """
    label = f"{job.label} {job.arch}"
    cubin = work / f"{label.replace('/', '-').replace(' ', '-')}.cubin"
    start = time.monotonic()
    try:
        nvcc.compile_unit(job.source, job.arch, tree, cubin)
    except CommandError as error:
        msg = f"{label}: nvcc fails:\n{error}"
        raise CheckError(msg, "fix the source, or the patch that changed it") from error
    seconds = round(time.monotonic() - start, 1)
    kernels = tuple(readers.read(cubin))
    problems = checks.problems(kernels, job.unit.promise, job.arch, job.kernels)
    return Verdict(label, job.unit.control, kernels, tuple(problems), seconds)


def tell(verdict: Verdict) -> Verdict:
    """Log a verdict and return it."""
    has = sorted({word for kernel in verdict.kernels for word in kernel.mma})
    code = f": {len(verdict.kernels)} kernels, {', '.join(has) or 'no matrix instructions'}"
    log.info(
        f"{'ok' if verdict.ok else 'FAILED':6} {verdict.label}{code if verdict.kernels else ''}"
    )
    for problem in () if verdict.ok else verdict.problems or ("a control that no check refuses",):
        log.info(f"    {problem}")
    return verdict


def run(
    project: Project, chosen: Sequence[Unit], *, record: bool, asked: int | None
) -> list[Verdict]:
    """Run units and return their verdicts.

    Raises:
        MachineError: nvcc is missing.
        PinsError: the record of the decode kernels differs from them.
    """
    compiled = [unit for unit in chosen if not unit.stage]
    if compiled:
        log.heading(f"{len(compiled)} units with {nvcc.identity()}")
    readers = cuobjdump.readers(project.store, project.root, host_platform(), project.access)
    verdicts = []
    for unit in chosen:
        if unit.stage:
            stage = decode.read(project, readers)
            verdicts += [
                tell(Verdict(f"{unit.name} {arch}", False, (), tuple(decode.problems(stage, arch))))
                for arch in unit.archs
            ]
            text = kernelrecord.text(stage.record)
            if record:
                kernelrecord.FILE.write_text(text)
            elif not kernelrecord.FILE.is_file() or kernelrecord.FILE.read_text() != text:
                raise PinsError(f"{kernelrecord.FILE}: out of date", kernelrecord.HINT)
    with project.store.temporary("proofs") as work:
        for needs_tree in (False, True):
            group = [unit for unit in compiled if unit.tree == needs_tree]
            if group:
                verdicts += _compiled(project, group, readers, work, asked)
    return verdicts


def _compiled(
    project: Project, group: Sequence[Unit], readers: Readers, work: Path, asked: int | None
) -> list[Verdict]:
    def go(tree: Path | None) -> list[Verdict]:
        def one(job: Job, stopping: Event) -> Verdict:
            return prove(job, tree, readers, work)

        todo = [job for unit in group for job in jobs_of(unit, tree, work)]
        width = jobs.width(asked, jobs.NVCC_GIB)
        return [tell(verdict) for verdict in in_parallel(one, todo, width)]

    if not group[0].tree:
        return go(None)
    with patched_tree(project) as tree:
        return go(tree)


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or that of the first error."""
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m tools.proofs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="units (default: all)")
    parser.add_argument("--ci", action="store_true", help="the smallest sufficient set")
    parser.add_argument("--list", action="store_true", help="list the units and exit")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: as memory allows)")
    parser.add_argument("--record", action="store_true", help="write the decode kernels' record")
    parser.add_argument("--store", type=Path, help="store folder, as for build.py")
    parser.add_argument("--pins", type=Path, help="another checkout's pins.yaml")
    parser.add_argument("--offline", action="store_true", help="use no network")
    given = parser.parse_args(words)
    try:
        chosen = units.choose(given.names, ci=given.ci)
        if given.list:
            for unit in chosen:
                log.info(f"{unit.name}  [{' '.join(unit.archs)}]\n    {unit.summary}")
            return 0
        project = Project.open(
            ProjectOptions(pins=given.pins, store=given.store, offline=given.offline)
        )
        project.store.sweep()
        verdicts = run(project, chosen, record=given.record, asked=given.jobs)
        report = project.root / "dist" / "proofs" / "report.json"
        document = {
            "ran_on": "no GPU: compiled and disassembled only",
            "nvcc": nvcc.identity() if shutil.which("nvcc") else "",
            "ok": all(verdict.ok for verdict in verdicts),
            "proofs": [{**asdict(verdict), "ok": verdict.ok} for verdict in verdicts],
        }
        write_file(report, f"{json.dumps(document, indent=1)}\n".encode())
        if failed := [verdict.label for verdict in verdicts if not verdict.ok]:
            raise CheckError(f"failed: {', '.join(failed)}", f"see {report}")
        log.heading(f"{len(verdicts)} proofs pass; {report}")
    except SparkforgeError as error:
        return log.failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
