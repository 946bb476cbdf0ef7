"""Units → jobs → machine code → facts → a verdict. Results in the store are reused."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from sparkforge.build.jobs import NVCC_GIB
from sparkforge.build.jobs import width as jobs_width
from sparkforge.core import git
from sparkforge.core.errors import CommandError, ProofError
from sparkforge.core.log import log
from sparkforge.core.parallel import in_parallel
from sparkforge.core.run import call
from sparkforge.inspect.proofs import checks, cubin, toolchain
from sparkforge.inspect.proofs.checks import Promise
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.toolchain import Readers
from sparkforge.inspect.proofs.units import HERE, Unit, generated_kernels
from sparkforge.pins.pins import RELEASE_PLAN, Upstream
from sparkforge.series import series
from sparkforge.sources import sources
from sparkforge.sources.sources import Access
from sparkforge.store.codekey import code_of
from sparkforge.store.store import Store

_TREE = ("csrc", "include", "3rdparty")
_GENERATOR = "flashinfer/jit/gemm"
_GENERATE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module("cutlass.generate_kernels")
module.generate_gemm_operations(sys.argv[2], "120;120-real")
"""


@dataclass(frozen=True)
class Tree:
    """The compiler's part of an upstream's patched tree."""

    path: Path
    identity: Mapping[str, str]
    """Git's tree id of each folder, for a unit's key."""


@dataclass(frozen=True)
class Job:
    """One source for one architecture."""

    unit: Unit
    arch: str
    label: str
    source: str
    promise: Promise


@dataclass(frozen=True)
class Verdict:
    """Result of a job.

    Attributes:
        problems: of the checks.
        seconds: of the compile.
        fresh: whether it was compiled now.
    """

    job: Job
    kernels: tuple[Kernel, ...]
    problems: tuple[str, ...]
    seconds: float
    fresh: bool

    @property
    def ok(self) -> bool:
        """Whether it passes; a control passes if the checks refuse it as a stub."""
        if not self.job.unit.control:
            return not self.problems
        # for the control's only reason
        return bool(self.problems) and all(checks.STUB in problem for problem in self.problems)


# -- sources -----------------------------------------------------------------------


@dataclass(frozen=True)
class TreeResult:
    """An unpacked tree, and its commit."""

    commit: str


def patched_tree(store: Store, root: Path, name: str, upstream: Upstream, access: Access) -> Tree:
    """Return an upstream's patched tree, unpacked in the store.

    Raises:
        FetchError, IntegrityError, SeriesError: as for a build.
    """
    source = sources.ensure(store, name, upstream, RELEASE_PLAN, access)
    patches = series.read(root / "patches" / name)
    patched = series.apply_recorded(store, patches, source, upstream)
    folders = (*_TREE, _GENERATOR)
    ids = git.git(source.repo, "rev-parse", *(f"{patched.commit}:{folder}" for folder in folders))
    identity = dict(zip(folders, ids.split(), strict=True))

    def make(folder: Path) -> TreeResult:
        git.unpack(source.repo, patched.commit, folders, folder / "tree")
        return TreeResult(patched.commit)

    inputs = {"upstream": name, "folders": identity, "code": code_of(git.__name__)}
    made = toolchain.keep(store, "proof-trees", f"tree {name}", inputs, TreeResult, make)
    return Tree(made.path / "tree", identity)


def jobs(units: Sequence[Unit], trees: Mapping[str, Tree], store: Store) -> list[Job]:
    """Return the jobs to compile; FlashInfer's generator writes the sources of some units.

    Raises:
        ProofError: it writes no file for a unit.
    """
    written: dict[str, str] = {}
    if any(unit.generated for unit in units):
        written = _generate(trees["flashinfer"], store)
    result = []
    for unit in units:
        parts = (
            {unit.name: _source(unit, trees)}
            if unit.generated is None
            else {
                f"{unit.name}/{name}": text
                for name, text in written.items()
                if set(generated_kernels(text)) == {unit.generated}
            }
        )
        if not parts:
            msg = f"{unit.name}: FlashInfer's generator creates no kernel of {unit.generated}"
            raise ProofError(msg, "apply the series that adds them, or update the proof")
        for arch in unit.archs:
            for label, text in parts.items():
                promise = unit.promise
                if unit.generated is not None:
                    promise = Promise(
                        promise.mma, len(generated_kernels(text)), promise.stack, promise.sized
                    )
                result.append(Job(unit, arch, f"{label} {arch}", text, promise))
    return result


def _source(unit: Unit, trees: Mapping[str, Tree]) -> str:
    if unit.text is not None:
        return unit.text
    assert unit.file is not None
    if unit.upstream is None:
        return (HERE / unit.file).read_text(encoding="utf-8")
    return (trees[unit.upstream].path / unit.file).read_text(encoding="utf-8")


def _generate(tree: Tree, store: Store) -> dict[str, str]:
    """Return FlashInfer's generated SM12x files: short name → source."""
    with store.temporary("generate") as work:
        call(sys.executable, "-I", "-c", _GENERATE, tree.path / _GENERATOR, work)
        files = sorted(work.rglob("gemm_grouped/120/**/*.generated.cu"))
        return {
            path.name.partition(".")[0].rpartition("sm120_")[2]: path.read_text(encoding="utf-8")
            for path in files
        }


# -- compiling and reading -------------------------------------------------------------


def width(asked: int | None) -> int:
    """Return the number of parallel compilers, limited by memory and CPUs."""
    return jobs_width(asked, NVCC_GIB)  # these compilers have no gate


@dataclass(frozen=True)
class CubinResult:
    """A compiled unit.

    Attributes:
        label: of its job.
    """

    label: str


@dataclass(frozen=True)
class FactsResult:
    """The kernels of a compiled unit."""

    kernels: tuple[Kernel, ...]


def prove(
    store: Store, todo: Sequence[Job], trees: Mapping[str, Tree], readers: Readers, at_once: int
) -> list[Verdict]:
    """Compile and read the jobs that the store lacks, and check all."""
    nvcc = toolchain.nvcc_identity()
    compiling, reading = code_of(cubin.__name__), code_of("sparkforge.inspect.proofs.sass")
    verdicts = []

    def prove(job: Job, stopping: Event) -> Verdict:
        tree = trees[job.unit.upstream] if job.unit.upstream is not None else None
        compiled = {
            "source": hashlib.sha256(job.source.encode()).hexdigest(),
            "arch": job.arch,
            "nvcc": nvcc,
            "tree": {k: v for k, v in tree.identity.items() if k in _TREE} if tree else None,
            "code": compiling,
        }
        fresh = store.find("proof-cubins", compiled, CubinResult) is None

        def build(folder: Path) -> CubinResult:
            where = tree.path if tree else None
            try:
                cubin.compile_unit(job.source, job.unit.file, job.arch, where, folder)
            except CommandError as error:
                msg = f"{job.label}: nvcc fails:\n{error}"
                raise ProofError(msg, "fix the source, or the patch that changed it") from error
            return CubinResult(job.label)

        made = toolchain.keep(
            store, "proof-cubins", f"cubin {job.label}", compiled, CubinResult, build
        )

        def facts(folder: Path) -> FactsResult:
            return FactsResult(tuple(readers.read(made.path / cubin.NAME)))

        inputs = {"cubin": made.key, "readers": readers.identity, "code": reading}
        label = f"facts {job.label}"
        read = toolchain.keep(store, "proof-facts", label, inputs, FactsResult, facts)
        kernels = read.result.kernels
        found = checks.problems(kernels, job.promise, job.arch)
        return Verdict(job, kernels, tuple(found), made.seconds, fresh)

    for done, verdict in enumerate(in_parallel(prove, todo, at_once), 1):
        verdicts.append(verdict)
        tell(verdict, f"{done}/{len(todo)} ")
    return verdicts


def tell(verdict: Verdict, count: str = "") -> None:
    """Log the result of a job."""
    took = f"compiled in {verdict.seconds:.0f} s" if verdict.fresh else "in the store"
    log.info(f"{count}{'ok' if verdict.ok else 'FAILED':6} {verdict.job.label}  ({took})")
    if not verdict.ok:
        for problem in verdict.problems or ("no check rejects it, as one must",):
            log.info(f"    {problem}")
