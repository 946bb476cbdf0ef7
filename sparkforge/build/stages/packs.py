"""FlashInfer's modules, compiled ahead of time, as a wheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results, holds_wheel
from sparkforge.build.lockedcompiler import LockedCompiler
from sparkforge.build.packs.names import LABEL, LOCK, STAGE, UPSTREAM
from sparkforge.build.results import PackResult
from sparkforge.core import git
from sparkforge.core.errors import UsageError
from sparkforge.core.hashing import sha256_file
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.build.packs.modules import Module
    from sparkforge.build.stages.wheels import Tree


def packs_item(context: Context, tree: Tree | None, modules: Sequence[Module]) -> Item[PackResult]:
    """Return the wheel of these modules for a target.

    A machine without the C++ compiler for its host code can plan it, not make it.

    Args:
        tree: FlashInfer's; None: the target has none.

    Raises:
        UsageError: the target has no GPU, or none of FlashInfer.
    """
    from sparkforge.build.packs import toolchain  # not needed by other builds

    arch = context.target.cuda_arch
    if arch is None or tree is None or UPSTREAM not in context.target.wheels:
        msg = f"target {context.target_name} has no GPU, so FlashInfer compiles nothing for it"
        raise UsageError(msg, "choose spark or rtx")
    host = toolchain.found(context.platform)
    upstream = context.pins.upstream(UPSTREAM)
    nvcc = LockedCompiler(context.root / LOCK, "nvidia-cuda-nvcc")
    version = f"{upstream.version}+{context.target.wheels[UPSTREAM].local}"
    pack = _Pack(
        context,
        tree,
        modules,
        family=f"{arch}f",
        nvcc=nvcc,
        compiler=sha256_file(nvcc.lock),
        version=f"{version}.{context.pins.release.counter}",
    )
    inputs = {
        "upstream_commit": upstream.commit_or_unknown,
        "series": context.series_of(UPSTREAM).sha256,
        "modules": [module.name for module in modules],
        "architecture": pack.family,
        "platform": context.platform,
        "compiler": pack.compiler,
        "host": toolchain.MISSING if host is None else host.identity,
        "version": pack.version,
        "epoch": context.epoch,
        "code": code_of(__name__),
    }
    return Item(
        STAGE,
        LABEL,
        inputs,
        PackResult,
        pack.make,
        needs=tree.items,
        valid=holds_wheel,
        fetches=lambda: nvcc.fetches(context),
    )


@dataclass(frozen=True)
class _Pack:
    """The inputs of a pack."""

    context: Context
    tree: Tree
    modules: Sequence[Module]
    family: str
    """The architecture, as nvcc names its family: ``12.1f``."""
    nvcc: LockedCompiler
    compiler: str
    """sha256 of the lock of ``nvcc``."""
    version: str

    def make(self, folder: Path, results: Results) -> PackResult:
        """Compile the modules, and write their wheel."""
        from sparkforge.build.packs import compiling, recipe, toolchain, units, wheel

        context = self.context
        host = toolchain.host(context.platform)
        patched = self.tree.layer(context, results).patched
        repo, commit = patched.source.repo, patched.commit
        with context.store.temporary("packs") as work:
            self.nvcc.fill(context, work / WHEELS)
            recipe.fill(repo, commit, work / WHEELS, host, work / "tree")
            ids = git.git(repo, "rev-parse", *(f"{commit}:{name}" for name in recipe.READ)).split()
            request = compiling.Request(
                context.store,
                work / "tree",
                dict(zip(recipe.READ, ids, strict=True)),
                self.family,
                self.compiler,
                host,
                context.jobs,
            )
            described = units.describe(work / "tree", self.family, self.modules)
            objects = compiling.compile_units(request, described)
            made = [compiling.link(request, module, objects) for module in described]
        entries = [
            wheel.Entry(
                module.name,
                library.result.sha256,
                library.result.size,
                len(module.units),
                pinned.needs,
            )
            for pinned, module, library in zip(self.modules, described, made, strict=True)
        ]
        pack = wheel.Pack(
            self.version,
            f"sm{self.family.replace('.', '')}",
            context.platform,
            commit,
            f"nvcc {self.nvcc.version()}",
            host.identity,
            tuple(entries),
        )
        libraries = {
            module.name: library.path / f"{module.name}.so"
            for module, library in zip(described, made, strict=True)
        }
        path = wheel.write(pack, libraries, context.epoch, folder)
        return PackResult(
            path.name,
            sha256_file(path),
            pack.version,
            {entry.name: entry.sha256 for entry in entries},
            units=len(objects),
        )
