"""Units → objects in the store → shared libraries in the store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from threading import Event

from sparkforge.build.jobs import KEEP_GIB, width
from sparkforge.build.packs import recipe
from sparkforge.build.packs.toolchain import Host
from sparkforge.build.packs.units import GENERATED, Described, Unit, contents
from sparkforge.core.disk import intact, key_of, sha256_file
from sparkforge.core.errors import BuildError, CommandError
from sparkforge.core.log import counted, human_bytes, log
from sparkforge.core.run import in_parallel
from sparkforge.store.store import Artefact, Store, T

_STAGE = "packs"
_SHOWN_LINES = 20
_LARGE = re.compile(r"gemm_grouped/")
# GiB that one compiler takes at most; nvcc 13.0.88 on x86-64 (docs/build.md)
LARGEST_GIB, OTHER_GIB = 8.0, 2.0
# messages of g++ and nvcc when the kernel has killed their child processes
_KILLED = re.compile(r"Killed signal|died due to signal 9")


@dataclass(frozen=True)
class ObjectResult:
    """An object."""

    sha256: str


@dataclass(frozen=True)
class LibraryResult:
    """A module."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Request:
    """The inputs that all units share."""

    store: Store
    tree: Path
    """FlashInfer's patched source, with generated files, the toolchain and the stubs."""
    sources: Mapping[str, str]
    """Id of each folder of the tree, for keys."""
    architecture: str
    """Of the GPU, e.g. ``12.1f``."""
    compiler: str
    """sha256 of the lock of nvcc's wheels."""
    host: Host
    jobs: int | None
    """Compilers at once; None: as many as fit in memory."""


def memory_gib(unit: Unit) -> float:
    """Return the memory that compiling a unit takes at most, GiB."""
    return LARGEST_GIB if _LARGE.search(unit.source) else OTHER_GIB


def compile_units(
    request: Request, modules: Sequence[Described]
) -> dict[Unit, Artefact[ObjectResult]]:
    """Compile the units that the store lacks, those that take much memory first.

    Raises:
        BuildError: a compiler refuses a source.
    """
    every = list(dict.fromkeys(unit for module in modules for unit in module.units))
    found, damaged = {}, set()
    for unit in every:
        made = request.store.find(_STAGE, _inputs(request, unit), ObjectResult)
        if made is not None and intact(made.path / recipe.OBJECT, made.result.sha256):
            found[unit] = made
        elif made is not None:
            log.warning(f"{made.path}: damaged in the store: compiling it again")
            damaged.add(unit)
    missing = [unit for unit in every if unit not in found]
    of = f"{counted(len(every), 'unit')} of {counted(len(modules), 'module')}"
    log.info(f"{of}, {len(missing)} to compile")
    (request.tree / "objects").mkdir(exist_ok=True)

    def compiled(unit: Unit, stopping: Event) -> Artefact[ObjectResult]:
        return request.store.build(
            _STAGE,
            _inputs(request, unit),
            ObjectResult,
            lambda folder: _compile(request, unit, folder),
            again=unit in damaged,
        )

    for gib in (LARGEST_GIB, OTHER_GIB):
        todo = [unit for unit in missing if memory_gib(unit) == gib]
        if todo:
            at_once = min(width(request.jobs, gib, KEEP_GIB), len(todo))
            for unit, made in zip(todo, in_parallel(compiled, todo, at_once), strict=True):
                found[unit] = made
                name = unit.source.removeprefix(GENERATED)
                log.progress(name, len(found), len(every), "units")
    for module in modules:
        for unit in module.units:
            _remember(request, found[unit], module.name, unit.source)
    return found


def _remember(request: Request, made: Artefact[T], module: str, source: str = "") -> None:
    """Note a unit or a module as the newest of its name: `clean --superseded` removes the others.

    Args:
        source: of the unit; "": the module itself.
    """
    # both names together are too long for a file name
    name = {"architecture": request.architecture, "module": module, "source": source}
    request.store.remember(_STAGE, key_of(name)[:32], made)


def _inputs(request: Request, unit: Unit) -> dict[str, object]:
    return {
        "source": unit.source,
        "contents": contents(request.tree, unit),
        "flags": list(unit.flags),
        "tree": dict(request.sources),
        "compiler": request.compiler,
        "host": request.host.identity,
        "code": recipe.digest(),
    }


def _compile(request: Request, unit: Unit, folder: Path) -> ObjectResult:
    """Write ``unit.o`` into a folder."""
    name = key_of(_inputs(request, unit))[:16]
    done = recipe.compile_unit(request.tree, request.host, unit, name, folder)
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace")
        shown = "\n".join(f"    {line}" for line in text.splitlines()[-_SHOWN_LINES:])
        msg = f"{unit.source}: cannot be compiled (exit code {done.returncode}):\n{shown}"
        remedy = "fix the source, or the patch that changed it"
        if _KILLED.search(text) or done.returncode in (-SIGKILL, 128 + SIGKILL):
            remedy = f"free memory (it takes up to {memory_gib(unit):.0f} GiB), or use --jobs 1"
        raise BuildError(msg, remedy)
    return ObjectResult(sha256_file(folder / recipe.OBJECT))


def link(
    request: Request, module: Described, objects: Mapping[Unit, Artefact[ObjectResult]]
) -> Artefact[LibraryResult]:
    """Link a module's objects, in the order of their sources.

    Raises:
        BuildError: the linker fails, or the library needs newer ones than the image has.
    """
    parts = [objects[unit] for unit in module.units]
    inputs = {
        "module": module.name,
        "objects": [part.key for part in parts],
        "link": list(module.link),
        "host": request.host.identity,
        "code": recipe.digest(),
    }

    def make(folder: Path) -> LibraryResult:
        files = [part.path / recipe.OBJECT for part in parts]
        try:
            out = recipe.link(request.tree, request.host, module, files, folder)
        except CommandError as error:
            msg = f"{module.name} cannot be linked:\n{error}"
            raise BuildError(msg, "see the linker's output") from error
        log.info(f"{module.name}: {human_bytes(out.stat().st_size)}")
        return LibraryResult(sha256_file(out), out.stat().st_size)

    kept = request.store.find(_STAGE, inputs, LibraryResult)
    again = kept is not None and not intact(kept.path / f"{module.name}.so", kept.result.sha256)
    made = request.store.build(_STAGE, inputs, LibraryResult, make, again=again)
    _remember(request, made, module.name)
    return made
