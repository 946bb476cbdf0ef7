"""Triton's side: the scattering matmul of triton_kernels, built for 12.1 by Triton and ptxas.

It needs an interpreter with PyTorch (the cpu target's environment) and Triton as the Spark has it:
the pinned version with its series, for that interpreter.
"""

from __future__ import annotations

import os
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge.build import executor
from sparkforge.build.context import Context
from sparkforge.build.stages.wheels import release_wheel
from sparkforge.core import git, plain
from sparkforge.core.errors import CommandError, ProofError
from sparkforge.core.hashing import code_digest
from sparkforge.core.log import counted
from sparkforge.core.run import call
from sparkforge.inspect.proofs import checks
from sparkforge.inspect.proofs.runner import Job, Verdict
from sparkforge.inspect.proofs.sass import Kernel
from sparkforge.inspect.proofs.toolchain import Readers, keep
from sparkforge.inspect.proofs.units import Unit
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.runtime.environment import python_path
from sparkforge.series import series
from sparkforge.series.series import Patched
from sparkforge.sources import sources
from sparkforge.store.codekey import code_of
from sparkforge.wheels import overlay

TARGET = "cpu"
"""The target whose interpreter runs Triton: it has PyTorch, and needs no GPU."""
_WHEEL = "cp311-amd64"
_PROBE = Path(__file__).parent / "probe_scatter.py"
# files of Triton's wheel for compiling: no profiler, no debugger's plugins
_PARTS = ("triton/", "triton-")
_LEFT_OUT = (
    "triton/backends/nvidia/lib/cupti/",
    "triton/instrumentation/",
    "triton/plugins/",
    "triton/FileCheck",
    "triton/_C/libproton.so",
)
_PACKAGE = "python/triton_kernels"


@dataclass(frozen=True)
class Built:
    """The probe's result for one tile height.

    Attributes:
        error: of the compile, or "".
        scatter4, gather4: TMA scatters and gathers in the PTX.
        shared: dynamic bytes per block that Triton requests.
    """

    block_m: int
    error: str
    kernels: tuple[Kernel, ...]
    scatter4: int
    gather4: int
    shared: int


@dataclass(frozen=True)
class PackagesResult:
    """Triton, triton_kernels or both, in the artefact's folder."""


@dataclass(frozen=True)
class CasesResult:
    """Results of the probe, one for each tile height."""

    cases: tuple[Built, ...]


def _layer(context: Context, upstream: str, patched: bool) -> tuple[overlay.Layer, str]:
    """Return an upstream's tree with its series or without, and its name in a key."""
    pinned = context.pins.upstream(upstream)
    source = sources.ensure(context.store, upstream, pinned, RELEASE_PLAN, context.access)
    tree = Patched(source, source.commit, source.tree)
    if patched:
        patches = context.series_of(upstream)
        series.check_emptied(patches, pinned)
        tree = series.apply(context.store, patches, source)
    return overlay.Layer(tree, pinned.paths), tree.tree


def packages(context: Context, *, triton: bool = True, kernels: bool = True) -> Path:
    """Return a folder with Triton and triton_kernels for a path.

    Args:
        triton, kernels: whether with our series.

    Raises:
        FetchError, IntegrityError, SeriesError, WheelError: as for a build.
    """
    store, pinned = context.store, context.pins.upstream("triton")
    file = pinned.files[_WHEEL]
    layer, triton_tree = _layer(context, "triton", triton)
    ours, kernels_tree = _layer(context, "triton-kernels", kernels)
    inputs = {
        "wheel": file.sha256,
        "triton": triton_tree,
        "triton_kernels": kernels_tree,
        "code": [code_digest(Path(__file__)), code_of("sparkforge.wheels.overlay")],
    }

    def make(folder: Path) -> PackagesResult:
        request = overlay.Request(
            wheel=release_wheel(context, "triton", file),
            name=None,
            local="proof",
            drop_requires=(),
            version_file=None,
            epoch=context.epoch,
        )
        release = _release(context, request.wheel)
        shutil.copytree(release, folder, copy_function=os.link, dirs_exist_ok=True)
        with store.temporary("triton") as work:
            made = overlay.build(request, [layer], work)
            with zipfile.ZipFile(made.path) as wheel:
                for member in (*made.replaced, *made.added):
                    (folder / member).unlink(missing_ok=True)  # the release's own
                    wheel.extract(member, folder)
        tree = f"{ours.patched.commit}:{_PACKAGE}"
        git.unpack(ours.patched.source.repo, tree, ["triton_kernels"], folder / "kernels")
        return PackagesResult()

    label = f"triton packages, series: {triton=} {kernels=}"
    return keep(store, "proof-triton", label, inputs, PackagesResult, make).path


def prove(context: Context, unit: Unit, readers: Readers) -> list[Verdict]:
    """Build and check every architecture of a unit."""
    python, folder = interpreter(context), packages(context)
    verdicts = []
    for arch in unit.archs:
        start = time.monotonic()
        cases, fresh = build(context, python, folder, arch.removesuffix("a"), readers)
        found = []
        for case in cases:
            wrong = []
            if case.error:
                wrong.append(case.error.partition("\n")[0])
            else:
                wrong += checks.problems(case.kernels, unit.promise, arch)
                if case.scatter4:
                    wrong.append(f"has {counted(case.scatter4, 'TMA scatter')}, which SM12x lacks")
                if not case.gather4:
                    wrong.append("has no TMA gather, which SM12x supports")
            found += [f"tile of {case.block_m} rows: {problem}" for problem in wrong]
        kernels = tuple(kernel for case in cases for kernel in case.kernels)
        job = Job(unit, arch, f"{unit.name} {arch}", "", unit.promise)
        seconds = time.monotonic() - start
        verdicts.append(Verdict(job, kernels, tuple(found), seconds, fresh))
    return verdicts


def _release(context: Context, wheel: Path) -> Path:
    """Return Triton's unpacked release (half a gigabyte), to which packages are linked."""

    def make(folder: Path) -> PackagesResult:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = info.filename
                if name.startswith(_PARTS) and not name.startswith(_LEFT_OUT):
                    path = Path(archive.extract(info, folder / "files"))
                    executable = (info.external_attr >> 16) & 0o100
                    path.chmod(0o755 if executable or info.is_dir() else 0o644)
        return PackagesResult()

    inputs = {"wheel": wheel.parent.name, "code": code_digest(Path(__file__))}
    label = "triton release"
    made = keep(context.store, "proof-triton-release", label, inputs, PackagesResult, make)
    return made.path / "files"


def interpreter(context: Context) -> Path:
    """Return the cpu target's Python, with its environment built if the store lacks it."""
    build = executor.build(context, "image")
    return python_path(build.results.artefact(build.graph.product).path)


def build(
    context: Context, python: Path, folder: Path, capability: str, readers: Readers
) -> tuple[Sequence[Built], bool]:
    """Build the scattering matmul and read its machine code.

    Args:
        folder: of ``packages``.
        capability: e.g. ``121``.

    Returns:
        The kernels, one for each tile height, and whether they were built now.

    Raises:
        ProofError: the probe itself fails.
    """
    inputs = {
        "python": str(python),
        "packages": folder.name,
        "capability": capability,
        "code": [code_digest(_PROBE), code_of("sparkforge.inspect.proofs.sass")],
        "readers": readers.identity,
    }

    def make(out: Path) -> CasesResult:
        path = f"{folder}:{folder / 'kernels'}"
        env = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(out / "cache"), "TMPDIR": str(out)}
        try:
            call(python, "-P", _PROBE, capability, out, env=env)
        except CommandError as error:
            raise ProofError(f"the Triton probe failed:\n{error}", "see above") from error
        result = plain.json_of((out / "kernels.json").read_text())
        return CasesResult(tuple(_built(case, out, readers) for case in result["cases"]))

    fresh = context.store.find("proof-triton-cubins", inputs, CasesResult) is None
    label = f"triton cubins {capability} {folder.name}"
    made = keep(context.store, "proof-triton-cubins", label, inputs, CasesResult, make)
    return made.result.cases, fresh


def _built(case: Mapping[str, Any], folder: Path, readers: Readers) -> Built:
    kernels = []
    for kernel in case["kernels"]:
        (facts,) = readers.read(folder / f"{kernel['name']}.cubin")
        kernels.append(replace(facts, shared_dynamic=kernel["shared"]))
    return Built(
        block_m=case["block_m"],
        error=case["error"],
        kernels=tuple(kernels),
        scatter4=sum(kernel["scatter4"] for kernel in case["kernels"]),
        gather4=sum(kernel["gather4"] for kernel in case["kernels"]),
        shared=max((kernel["shared"] for kernel in case["kernels"]), default=0),
    )
