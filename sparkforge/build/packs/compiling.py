"""Units → objects in the store → shared libraries in the store."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from threading import Event, Lock

from sparkforge.build.jobs import KEEP_GIB, width
from sparkforge.build.packs import recipe
from sparkforge.build.packs.toolchain import Host
from sparkforge.build.packs.units import GENERATED, Described, Unit, contents, cost
from sparkforge.core.errors import CommandError, CompileError
from sparkforge.core.hashing import intact, key_of, sha256_file
from sparkforge.core.log import counted, human_bytes, log
from sparkforge.core.parallel import in_parallel
from sparkforge.sources.sizes import duration
from sparkforge.store.artefact import Artefact, T
from sparkforge.store.store import Store

_GATE = Path(__file__).parents[1] / "compile/gate.py"
_ROOT = Path(__file__).parents[3]
_STAGE = "packs"
_SMALL_GIB = 0.5
_SHOWN_LINES = 20
# messages of g++ and nvcc when the kernel has killed their child processes
_KILLED = re.compile(r"Killed signal|died due to signal 9")


@dataclass(frozen=True)
class ObjectResult:
    """An object, and the cost of its compile.

    Attributes:
        peak_mib: of its largest process.
    """

    sha256: str
    cpu_seconds: float
    peak_mib: int


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


class _Progress:
    """Counts finished units, and estimates the time that the others take."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._lock, self._begun = Lock(), time.monotonic()
        self._count, self._done = len(units), 0
        self._left, self._spent = sum(cost(unit).seconds for unit in units), 0.0

    def finished(self, unit: Unit, took: ObjectResult) -> None:
        with self._lock:
            self._done += 1
            self._left -= cost(unit).seconds
            self._spent += cost(unit).seconds
            seconds = (time.monotonic() - self._begun) * self._left / self._spent
            left = f", about {duration(seconds)} left" if self._done < self._count else ""
            log.info(
                f"{self._done}/{self._count} {unit.source.removeprefix(GENERATED)}:"
                f" {took.cpu_seconds:.0f} s of CPU, {took.peak_mib / 1024:.1f} GiB{left}"
            )


def compile_units(
    request: Request, modules: Sequence[Described]
) -> dict[Unit, Artefact[ObjectResult]]:
    """Compile the units that the store lacks, those that take longest first.

    Raises:
        CompileError: a compiler refuses a source.
    """
    every = list(dict.fromkeys(unit for module in modules for unit in module.units))
    inputs = {unit: _inputs(request, unit) for unit in every}
    found = {unit: request.store.find(_STAGE, inputs[unit], ObjectResult) for unit in every}
    damaged = {unit for unit, made in found.items() if made is not None and not _whole(made)}
    found |= dict.fromkeys(damaged)
    missing = [unit for unit in every if found[unit] is None]
    todo = sorted(missing, key=lambda unit: -cost(unit).seconds)
    of = f"{counted(len(every), 'unit')} of {counted(len(modules), 'module')}"
    log.info(f"{of}, {len(todo)} to compile")
    progress = _Progress(todo)
    (request.tree / "objects").mkdir(exist_ok=True)

    def compiled(unit: Unit, stopping: Event) -> Artefact[ObjectResult]:
        made = request.store.build(
            _STAGE,
            inputs[unit],
            ObjectResult,
            lambda folder: _compile(request, unit, folder),
            again=unit in damaged,
        )
        progress.finished(unit, made.result)
        return made

    if todo:
        at_once = width(request.jobs, _SMALL_GIB, KEEP_GIB)
        for unit, made in zip(
            todo, in_parallel(compiled, todo, min(at_once, len(todo))), strict=True
        ):
            found[unit] = made
    result = {}
    for module in modules:
        for unit in module.units:
            artefact = found[unit]
            assert artefact is not None
            _remember(request, artefact, module.name, unit.source)
            result[unit] = artefact
    return result


def _remember(request: Request, made: Artefact[T], module: str, source: str = "") -> None:
    """Note a unit or a module as the newest of its name: `clean --superseded` removes the others.

    Args:
        source: of the unit; "": the module itself.
    """
    # both names together are too long for a file name
    name = {"architecture": request.architecture, "module": module, "source": source}
    request.store.remember(_STAGE, key_of(name)[:32], made)


def _whole(made: Artefact[ObjectResult]) -> bool:
    """Return whether an object is as it was compiled."""
    path = made.path / recipe.OBJECT
    if intact(path, made.result.sha256):
        return True
    log.warning(f"{path}: damaged in the store: compiling it again")
    return False


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
    notes = folder / "took"
    done = recipe.compile_unit(
        request.tree,
        request.host,
        unit,
        key_of(_inputs(request, unit))[:16],
        folder,
        before=(sys.executable, "-IS", _GATE),
        env={
            "SPARKFORGE_SLOTS": str(request.tree / "slots"),
            "SPARKFORGE_JOBS": str(os.cpu_count() or 1),
            "SPARKFORGE_JOB_MIB": str(int(cost(unit).gib * 1024)),
            "SPARKFORGE_RESERVE_MIB": str(int(KEEP_GIB * 1024)),
            "SPARKFORGE_NOTES": str(notes),
            "SPARKFORGE_ROOT": str(_ROOT),
        },
    )
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace")
        said = "\n".join(f"    {line}" for line in text.splitlines()[-_SHOWN_LINES:])
        msg = f"{unit.source}: cannot be compiled (exit code {done.returncode}):\n{said}"
        remedy = "fix the source, or the patch that changed it"
        if _KILLED.search(text) or done.returncode == 128 + SIGKILL:
            remedy = f"free memory (this source takes up to {cost(unit).gib} GiB), or use --jobs 1"
        raise CompileError(msg, remedy)
    peak, seconds, *_ = notes.read_text().split("\t")
    notes.unlink()
    return ObjectResult(sha256_file(folder / recipe.OBJECT), float(seconds), int(peak))


def link(
    request: Request, module: Described, objects: Mapping[Unit, Artefact[ObjectResult]]
) -> Artefact[LibraryResult]:
    """Link a module's objects, in the order of their sources.

    Raises:
        CompileError: the linker fails, or the library needs newer ones than the image has.
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
            raise CompileError(msg, "see the linker's output") from error
        log.info(f"{module.name}: {human_bytes(out.stat().st_size)}")
        return LibraryResult(sha256_file(out), out.stat().st_size)

    kept = request.store.find(_STAGE, inputs, LibraryResult)
    again = kept is not None and not intact(kept.path / f"{module.name}.so", kept.result.sha256)
    made = request.store.build(_STAGE, inputs, LibraryResult, make, again=again)
    _remember(request, made, module.name)
    return made
