"""Compile kernels, disassemble them, and compare them with what they promise: README.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from sparkforge.build import jobs
from sparkforge.build.options import host_platform
from sparkforge.check import machinecode
from sparkforge.check.machinecode import Kernel, Readers
from sparkforge.core import git
from sparkforge.core.disk import write_file
from sparkforge.core.errors import CheckError, CommandError, SparkforgeError, UsageError
from sparkforge.core.log import log
from sparkforge.core.parallel import in_parallel
from sparkforge.core.run import call
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from tools.proofs.units import UNITS, Unit, passes, problems

INCLUDE = Path(__file__).with_name("include")
"""Our own sources and headers."""
_CUBLAS = Path(__file__).parents[2] / "sparkforge/build/packs/include"
_FOLDERS = ("csrc", "include", "3rdparty")
# As FlashInfer 0.7.0.post1 compiles its fused MoE for SM12x (jit/cpp_ext.py, jit/fused_moe.py).
# Without flags of a host object, since the result is a cubin.
_FLAGS = (
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-use_fast_math",
    "-DNDEBUG",
    "-O3",
    *(
        f"-DFLASHINFER_ENABLE_{kind}"
        for kind in ("FP8_E8M0", "FP4_E2M1", "F16", "BF16", "FP8_E4M3", "FP8_E5M2")
    ),
    "-DCOMPILE_BLACKWELL_TMA_GEMMS",
    "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS",
    *("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4"),
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
    "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
    *("-include", "sparkforge_shared_bytes.h"),
)
_INTERNAL = "csrc/nv_internal"
INCLUDES = (
    _INTERNAL,
    f"{_INTERNAL}/include",
    f"{_INTERNAL}/tensorrt_llm/cutlass_extensions/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels",
    "3rdparty/cccl/cub",
    "3rdparty/cccl/libcudacxx/include",
    "3rdparty/cccl/thrust",
    "include",
    "csrc",
    "3rdparty/cutlass/include",
    "3rdparty/cutlass/tools/util/include",
    "3rdparty/spdlog/include",
)


@dataclass(frozen=True)
class Verdict:
    """A unit for one architecture: its kernels and their problems."""

    label: str
    ok: bool
    kernels: tuple[Kernel, ...]
    problems: tuple[str, ...]


def patched_tree(project: Project, work: Path) -> Path:
    """Return FlashInfer's patched tree, unpacked into a folder.

    Raises:
        FetchError, IntegrityError, SeriesError: as for a build.
    """
    store, name = project.store, "flashinfer"
    upstream = project.pins.upstream(name)
    source = sources.ensure(store, name, upstream, RELEASE_PLAN, project.access)
    patches = series.read(project.root / "patches" / name)
    patched = series.apply_recorded(store, patches, source, upstream)
    git.unpack(source.repo, patched.commit, _FOLDERS, work / "tree")
    return work / "tree"


def prove(unit: Unit, arch: str, tree: Path, readers: Readers, work: Path) -> Verdict:
    """Compile a unit for an architecture, without host code, read it and check it.

    Raises:
        CheckError: nvcc fails, or its machine code can't be read.
        MachineError: there is no nvcc.
    """
    stem = work / f"{unit.name}-{arch}"
    source = (tree if unit.tree else INCLUDE) / unit.source
    if "\n" in unit.source:
        source = stem.with_suffix(".cu")
        source.write_text(unit.source, encoding="utf-8")
    words: list[str | Path] = [*_FLAGS] if unit.tree else []
    for include in (INCLUDE, _CUBLAS, *(tree / path for path in INCLUDES)) if unit.tree else ():
        words += ["-isystem", include]
    cubin = stem.with_suffix(".cubin")
    try:
        call("nvcc", "-std=c++17", *words, f"-arch=sm_{arch}", "-cubin", source, "-o", cubin)
    except CommandError as error:
        msg = f"{unit.name} {arch}: nvcc fails:\n{error}"
        raise CheckError(msg, "fix the source, or the patch that changed it") from error
    kernels = tuple(readers.read(cubin))
    wrong = tuple(problems(kernels, unit, arch))
    return Verdict(f"{unit.name} {arch}", passes(wrong, unit), kernels, wrong)


def run(project: Project, todo: Sequence[tuple[Unit, str]], asked: int | None) -> list[Verdict]:
    """Prove units, each for an architecture, and log the verdicts.

    Args:
        asked: compilers at once; None: as memory allows.
    """
    readers = machinecode.readers(project.store, project.root, host_platform(), project.access)
    verdicts = []
    with project.store.temporary("proofs") as work:
        tree = work
        if any(unit.tree for unit, _ in todo):
            tree = patched_tree(project, work)

        def one(job: tuple[Unit, str], _: Event) -> Verdict:
            return prove(*job, tree, readers, work)

        for verdict in in_parallel(one, todo, jobs.width(asked, jobs.NVCC_GIB)):
            verdicts.append(verdict)
            has = sorted({word for kernel in verdict.kernels for word in kernel.mma})
            code = f"{len(verdict.kernels)} kernels, {', '.join(has) or 'no matrix instructions'}"
            log.info(f"{'ok' if verdict.ok else 'FAILED':6} {verdict.label}: {code}")
            for problem in () if verdict.ok else verdict.problems:
                log.info(f"    {problem}")
    return verdicts


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or that of the first error."""
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m tools.proofs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="units (default: all)")
    parser.add_argument("--ci", action="store_true", help="the smallest sufficient set")
    parser.add_argument("--list", action="store_true", help="list the units and exit")
    parser.add_argument("--jobs", type=int, help="compilers at once (default: as memory allows)")
    parser.add_argument("--store", type=Path, help="store folder, as for build.py")
    parser.add_argument("--pins", type=Path, help="another checkout's pins.yaml")
    given = parser.parse_args(words)
    try:
        names = {unit.name for unit in UNITS}
        if unknown := set(given.names) - names:
            raise UsageError(f"no such proof: {', '.join(unknown)}", f"use {', '.join(names)}")
        chosen = [unit for unit in UNITS if unit.name in given.names or not given.names]
        todo = [(unit, arch) for unit in chosen for arch in (unit.ci if given.ci else unit.archs)]
        if given.list:
            for unit in chosen:
                log.info(f"{unit.name}  [{' '.join(unit.archs)}]\n    {unit.summary}")
            return 0
        project = Project.open(ProjectOptions(pins=given.pins, store=given.store))
        project.store.sweep()
        verdicts = run(project, todo, given.jobs)
        report = project.root / "dist" / "proofs" / "report.json"
        document = [asdict(verdict) for verdict in verdicts]
        write_file(report, f"{json.dumps(document, indent=1)}\n".encode())
        if failed := [verdict.label for verdict in verdicts if not verdict.ok]:
            raise CheckError(f"failed: {', '.join(failed)}", f"see {report}")
        log.heading(f"{len(verdicts)} proofs pass; {report}")
    except SparkforgeError as error:
        return log.failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
