"""FlashInfer's modules, compiled ahead of time, as a wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.context import WHEELS, Context
from sparkforge.build.item import Item, Results, holds_wheel
from sparkforge.build.lockedcompiler import LockedCompiler
from sparkforge.build.packs.modules import LOCK, UPSTREAM
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
    from sparkforge.build.packs import recipe  # not needed by other builds

    arch = context.target.cuda_arch
    if arch is None or tree is None or UPSTREAM not in context.target.wheels:
        msg = f"target {context.target_name} has no GPU, so FlashInfer compiles nothing for it"
        raise UsageError(msg, "choose spark or rtx")
    source = tree
    host = recipe.found(context.platform)
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
        "host": "none on this machine" if host is None else host.identity,
        "version": version,
        "epoch": context.epoch,
        "code": code_of(__name__),
    }

    def make(folder: Path, results: Results) -> PackResult:
        from sparkforge.build.packs import pack

        host = recipe.host(context.platform)
        patched = source.layer(context, results).patched
        repo, commit = patched.source.repo, patched.commit
        with context.store.temporary("packs") as work:
            tree = work / "tree"
            nvcc.fill(context, work / WHEELS)
            recipe.fill(repo, commit, work / WHEELS, host, tree)
            ids = git.git(repo, "rev-parse", *(f"{commit}:{name}" for name in recipe.READ)).split()
            shared = {"tree": dict(zip(recipe.READ, ids, strict=True)), "compiler": compiler}
            described = recipe.describe(tree, family, modules)
            store, jobs = context.store, context.jobs
            libraries = pack.libraries(store, tree, host, described, shared, jobs)
            about = {
                "version": version,
                "architecture": f"sm{family.replace('.', '')}",
                "platform": context.platform,
                "commit": commit,
                "compiler": f"nvcc {nvcc.version()}",
                "host": host.identity,
            }
            return pack.write(modules, described, libraries, about, context.epoch, folder)

    return Item(
        "packs",
        "pack flashinfer",
        inputs,
        PackResult,
        make,
        needs=source.items,
        valid=holds_wheel,
        fetches=lambda: nvcc.fetches(context),
    )
