"""Kernels of our series as machine code, which wheels get with the patched files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results, kernel_path
from sparkforge.build.lockedcompiler import LockedCompiler
from sparkforge.build.results import KernelsResult
from sparkforge.core import git
from sparkforge.core.hashing import intact, sha256_file
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.build.stages.wheels import Tree
    from sparkforge.series.series import Series


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
    compiler = LockedCompiler(context.root / pin.requirements, "nvidia-cuda-nvrtc")
    inputs = {
        "upstream_commit": context.pins.upstream(name).commit_or_unknown,
        "source": pin.source,
        "sources": sources,
        "wheel": pin.wheel,
        "architectures": list(pin.architectures),
        "spills": list(pin.spills),
        # of all platforms: the machine code does not depend on where it is compiled
        "compiler": sha256_file(compiler.lock),
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> KernelsResult:
        from sparkforge.build import cubins

        with context.store.temporary("kernels") as work:
            compiler.fill(context, work / WHEELS)
            cubins.unpack(work / WHEELS, work / "toolchain")
            patched = tree.layer(context, results).patched
            git.unpack(patched.source.repo, patched.commit, [pin.folder], work / "tree")
            request = cubins.Request(
                work / "tree",
                pin.source,
                pin.architectures,
                pin.spills,
                compiler.version(),
                patched.touched,
            )
            made = cubins.build(request, work / "toolchain", folder)
        return KernelsResult({f"{pin.wheel}{file}": sha256 for file, sha256 in made.items()})

    return Item(
        "kernels",
        f"kernels {name}",
        inputs,
        KernelsResult,
        make,
        needs=tree.items,
        valid=_complete,
        fetches=lambda: compiler.fetches(context),
    )


def sources_of(series: Series, folder: str) -> dict[str, str]:
    """Return the files that a series leaves in a folder, each with its blob."""
    found: dict[str, str] = {}
    for patch in series.patches:
        for entry in patch.entries:
            if entry.path.startswith(folder) and entry.new_blob is not None:
                found[entry.path] = entry.new_blob
    return {path: blob for path, blob in sorted(found.items()) if blob != git.ABSENT}


def _complete(artefact: Artefact[KernelsResult]) -> bool:
    files = artefact.result.files
    return all(intact(kernel_path(artefact.path, member), files[member]) for member in files)
