"""Kernels of our series as machine code, which wheels get beside the patched files."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results, kernel_path
from sparkforge.build.results import KernelsResult
from sparkforge.core import git
from sparkforge.core.errors import MachineError
from sparkforge.core.hashing import intact, sha256_file
from sparkforge.pins.types import MACHINES
from sparkforge.sources import sizes
from sparkforge.sources.download import Fetches
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.build.stages.wheels import Tree
    from sparkforge.series.series import Series
    from sparkforge.sources.wheelhouse import Wanted

PYTHON = "3.11"
"""For the choice of the compiler's wheels, which are for any."""


def kernels_item(context: Context, name: str, tree: Tree) -> Item[KernelsResult] | None:
    """Return the machine code of an upstream's kernels.

    None: the target has no GPU, or the series has no kernels.
    """
    pin = context.pins.upstream(name).kernels
    if pin is None or context.target.cuda_arch is None or tree.series is None:
        return None
    sources = sources_of(context.series_of(name), pin.folder)
    if pin.source not in sources:
        return None
    lock = context.root / pin.requirements
    inputs = {
        "upstream_commit": context.pins.upstream(name).commit_or_unknown,
        "source": pin.source,
        "sources": sources,
        "wheel": pin.wheel,
        "architectures": list(pin.architectures),
        "spills": list(pin.spills),
        # of all platforms: the machine code does not depend on where it is compiled
        "compiler": sha256_file(lock),
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> KernelsResult:
        from sparkforge.build import cubins
        from sparkforge.runtime import interpreter
        from sparkforge.sources import wheelhouse

        wanted = _wanted(lock)
        if wanted is None:
            msg = f"there is no compiler of GPU kernels for {platform.machine()}"
            raise MachineError(msg, f"build on a machine with {' or '.join(MACHINES)}")
        with context.store.temporary("kernels") as work:
            (work / WHEELS).mkdir()
            wheelhouse.fill(
                context.store,
                wanted,
                context.access.index,
                interpreter.uv_program(),
                offline=context.access.offline,
                into=work / WHEELS,
                known=sizes.read(context.root / sizes.FILE),
            )
            cubins.unpack(work / WHEELS, work / "toolchain")
            patched = tree.layer(context, results).patched
            git.unpack(patched.source.repo, patched.commit, [pin.folder], work / "tree")
            (version,) = (
                item.version for item in wheelhouse.read_lock(lock) if item.name == cubins.COMPILER
            )
            request = cubins.Request(
                work / "tree",
                pin.source,
                pin.architectures,
                pin.spills,
                version,
                patched.touched,
            )
            made = cubins.build(request, work / "toolchain", folder)
        return KernelsResult({f"{pin.wheel}{file}": sha256 for file, sha256 in made.items()})

    def fetches() -> Fetches:
        from sparkforge.sources import wheelhouse

        wanted = _wanted(lock)
        known = sizes.read(context.root / sizes.FILE)
        return Fetches() if wanted is None else wheelhouse.to_fetch(context.store, wanted, known)

    return Item(
        "kernels",
        f"kernels {name}",
        inputs,
        KernelsResult,
        make,
        needs=tree.items,
        valid=_complete,
        fetches=fetches,
    )


def sources_of(series: Series, folder: str) -> dict[str, str]:
    """Return the files that a series leaves in a folder, each with its blob."""
    found: dict[str, str] = {}
    for patch in series.patches:
        for entry in patch.entries:
            if entry.path.startswith(folder) and entry.new_blob is not None:
                found[entry.path] = entry.new_blob
    return {path: blob for path, blob in sorted(found.items()) if blob != git.ABSENT}


def _wanted(lock: Path) -> Wanted | None:
    """Return the compiler's wheels for this machine; None: there are none."""
    from sparkforge.sources import wheelhouse

    here = MACHINES.get(platform.machine())
    return None if here is None else wheelhouse.Wanted(lock, (), PYTHON, here, None)


def _complete(artefact: Artefact[KernelsResult]) -> bool:
    files = artefact.result.files
    return all(intact(kernel_path(artefact.path, member), files[member]) for member in files)
