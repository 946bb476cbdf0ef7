"""Machine code of the stage ``kernels``, as in wheels → verdicts, without a second compile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build import cubins, executor
from sparkforge.build.context import Context
from sparkforge.build.item import Item
from sparkforge.build.options import platform_of
from sparkforge.build.results import KernelsResult
from sparkforge.build.stages.kernels import kernels_item
from sparkforge.core import plain, typed
from sparkforge.core.errors import ProofError
from sparkforge.inspect.proofs import decode, toolchain
from sparkforge.inspect.proofs.decode import Decoded
from sparkforge.inspect.proofs.runner import Job, Verdict
from sparkforge.inspect.proofs.toolchain import Readers
from sparkforge.inspect.proofs.units import Unit
from sparkforge.sources.project import Project
from sparkforge.store.codekey import code_of


@dataclass(frozen=True)
class Cubin:
    """An architecture in the manifest."""

    architecture: str
    file: str
    sha256: str
    size: int
    kernels: tuple[cubins.Kernel, ...]


@dataclass(frozen=True)
class Manifest:
    """The manifest that ``cubins`` writes beside the machine code."""

    schema: int
    sources: Mapping[str, str]
    compiler: str
    flags: tuple[str, ...]
    cubins: tuple[Cubin, ...]


@dataclass(frozen=True)
class DecodedResult:
    """The kernels of one cubin."""

    kernels: tuple[Decoded, ...]


@dataclass(frozen=True)
class Read:
    """The stage's machine code.

    Attributes:
        sources: sha256 of each source, as in the stage's key.
        decoded: kernels by architecture.
        seconds: of the stage, and whether it ran now.
    """

    sources: Mapping[str, str]
    manifest: Manifest
    decoded: Mapping[str, tuple[Decoded, ...]]
    seconds: float
    fresh: bool


def item_of(project: Project) -> tuple[Context, Item[KernelsResult]]:
    """Return the stage's item, which is the same for every target, and a build with it.

    Raises:
        ProofError: there are no kernels.
    """
    pin = project.pins.plugin
    if pin is None:
        raise ProofError("there are no decode kernels", "see `plugin` in docs/patches-howto.md")
    name, target = next(iter(project.pins.targets.items()))
    context = Context.of(project, name, platform_of(target))
    return context, kernels_item(context, pin)


def read(project: Project, readers: Readers) -> Read:
    """Run the stage, if the store lacks its result, and read it.

    Raises:
        ProofError: it can't be read, or a kernel has no rule.
        CompileError, FetchError, PinsError: as for a build.
    """
    context, item = item_of(project)
    start = time.monotonic()
    fresh = item.find(context.store) is None
    artefact = executor.run(context, [item]).artefact(item)
    seconds = time.monotonic() - start
    manifest = typed.load(Manifest, plain.json_of((artefact.path / cubins.MANIFEST).read_bytes()))
    if manifest is None:
        msg = f"{artefact.path / cubins.MANIFEST}: another version wrote it"
        raise ProofError(msg, "compare it with sparkforge/inspect/proofs/stagekernels.py")
    decoded = {
        cubin.architecture: _decoded(context, readers, artefact.path / cubin.file, cubin)
        for cubin in manifest.cubins
    }
    sources: dict[str, Any] = item.inputs["sources"]
    return Read(sources, manifest, decoded, seconds, fresh)


def _decoded(context: Context, readers: Readers, path: Path, cubin: Cubin) -> tuple[Decoded, ...]:
    def facts(folder: Path) -> DecodedResult:
        listing = readers.dump("-sass", path)
        usage, elf = readers.dump("--dump-resource-usage", path), readers.dump("-elf", path)
        return DecodedResult(tuple(decode.decode(listing, usage, elf)))

    inputs = {
        "cubin": cubin.sha256,
        "readers": readers.identity,
        "code": code_of("sparkforge.inspect.proofs.decode"),
    }
    label = f"decode kernels {cubin.architecture}"
    kept = toolchain.keep(context.store, "proof-decode", label, inputs, DecodedResult, facts)
    return kept.result.kernels


def prove(found: Read, unit: Unit) -> list[Verdict]:
    """Check every architecture of a unit."""
    listed = {cubin.architecture: cubin.kernels for cubin in found.manifest.cubins}
    verdicts = []
    for arch in unit.archs:
        job = Job(unit, arch, f"{unit.name} {arch}", "", unit.promise)
        decoded = found.decoded.get(arch, ())
        wrong = decode.problems(decoded, listed.get(arch, ()), arch) if decoded else ["no kernels"]
        kernels = tuple(code.kernel for code in decoded)
        verdicts.append(Verdict(job, kernels, tuple(wrong), found.seconds, found.fresh))
    return verdicts
