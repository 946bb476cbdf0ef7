"""FlashInfer's modules, compiled ahead of time, as a wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.cached import Cached
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.packs.names import LABEL, LOCK, STAGE, UPSTREAM
from sparkforge.build.results import PackResult
from sparkforge.build.stages.thirdparty import LockedCompiler
from sparkforge.build.stages.trees import Tree
from sparkforge.build.stages.wheels import holds_wheel
from sparkforge.core import git
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import UsageError
from sparkforge.store.store import code_of

if TYPE_CHECKING:
    from sparkforge.build.packs.modules import Module


def packs_item(
    context: Context, tree: Tree | None, modules: Sequence[Module], jobs: int | None = None
) -> Cached[PackResult]:
    """Return the wheel of these modules for a target.

    A machine without the C++ compiler for its host code can plan it, not make it.

    Args:
        tree: FlashInfer's; None: the target has none.
        jobs: compilers at once; None: as many as fit in memory.
    """
    from sparkforge.build.packs import toolchain  # not needed by other builds

    arch = context.target.cuda_arch
    if arch is None or tree is None or UPSTREAM not in context.target.wheels:
        msg = f"target {context.target_name} has no GPU, so FlashInfer compiles nothing for it"
        raise UsageError(msg, "choose spark or rtx")
    source = tree
    host = toolchain.found(context.platform)
    upstream = context.pins.upstream(UPSTREAM)
    nvcc = LockedCompiler(context.root / LOCK, "nvidia-cuda-nvcc")
    compiler = sha256_file(nvcc.lock)
    family = f"{arch}f"
    local = f"{context.target.wheels[UPSTREAM].local}.{context.pins.release.counter}"
    version = f"{upstream.version}+{local}"
    inputs = {
        "upstream_commit": upstream.commit_or_unknown,
        "series": context.series_of(UPSTREAM).sha256,
        "modules": [module.name for module in modules],
        "architecture": family,
        "platform": context.platform,
        "compiler": compiler,
        "host": toolchain.MISSING if host is None else host.identity,
        "version": version,
        "epoch": context.epoch,
        "code": code_of(__name__),
    }

    def make(folder: Path) -> PackResult:
        from sparkforge.build.packs import compiling, recipe, toolchain, units, wheel

        host = toolchain.host(context.platform)
        patched = source.layer(context).patched
        repo, commit = patched.source.repo, patched.commit
        with context.store.temporary("packs") as work:
            nvcc.fill(context, work / WHEELS)
            recipe.fill(repo, commit, work / WHEELS, host, work / "tree")
            ids = git.git(repo, "rev-parse", *(f"{commit}:{name}" for name in recipe.READ)).split()
            request = compiling.Request(
                context.store,
                work / "tree",
                dict(zip(recipe.READ, ids, strict=True)),
                family,
                compiler,
                host,
                jobs,
            )
            described = units.describe(work / "tree", family, modules)
            objects = compiling.compile_units(request, described)
            libraries = {
                module.name: compiling.link(request, module, objects) for module in described
            }
        entries = [
            wheel.Entry(
                module.name,
                libraries[module.name].result.sha256,
                libraries[module.name].result.size,
                len(module.units),
                listed.needs,
            )
            for listed, module in zip(modules, described, strict=True)
        ]
        pack = wheel.Pack(
            version,
            f"sm{family.replace('.', '')}",
            context.platform,
            commit,
            f"nvcc {nvcc.version()}",
            host.identity,
            tuple(entries),
        )
        files = {name: library.path / f"{name}.so" for name, library in libraries.items()}
        path = wheel.write(pack, files, context.epoch, folder)
        hashes = {entry.name: entry.sha256 for entry in entries}
        return PackResult(path.name, sha256_file(path), version, hashes, units=len(objects))

    return Cached(
        STAGE,
        LABEL,
        inputs,
        PackResult,
        make,
        needs=source.items,
        valid=holds_wheel,
        fetches=lambda: nvcc.fetches(context),
    )
