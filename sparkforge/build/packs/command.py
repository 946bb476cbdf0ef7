"""`build.py packs`: FlashInfer's modules for a target → a wheel below dist/TARGET/packs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from cyclopts.types import PositiveInt

from sparkforge.build import cached, publish
from sparkforge.build.context import Context
from sparkforge.build.options import OutputOptions, command_options, platform_of
from sparkforge.build.packs import recipe
from sparkforge.build.packs.modules import UPSTREAM, pinned
from sparkforge.build.packs.pack import packs_item
from sparkforge.build.results import PackResult
from sparkforge.build.stages.trees import tree_of
from sparkforge.core.disk import disk_errors
from sparkforge.core.log import counted, human_bytes, log
from sparkforge.sources.project import Project, ProjectOptions


@command_options
class Options:
    """Options of ``packs``."""

    target: str
    """target to compile for: spark or rtx"""
    set: Literal["default", "all"] = "default"
    """default: what the profiles' defaults load; all: what --moe-backend flashinfer_cutlass,
    --kv-cache-dtype fp8 and --block-size load, too"""
    list: bool = False
    """list the modules and exit"""
    dry_run: bool = False
    """print the plan and exit"""
    jobs: PositiveInt | None = None
    """parallel compilers (default: as many as fit in memory)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Compile the modules that the store lacks, and link the wheel into dist/."""
    chosen = pinned([options.set], "--set")
    project = Project.open(options.project)
    context = Context.of(project, options.target, platform_of(project.pins.target(options.target)))
    if options.list:
        log.document({module.name: asdict(module) for module in chosen})
        for module in chosen:
            log.info(f"{module.name}{f'  [{module.needs}]' if module.needs else ''}")
        return 0
    item = packs_item(context, tree_of(context, UPSTREAM), chosen, options.jobs)
    todo = cached.ordered([item])
    steps = cached.plan(context, todo)
    if options.dry_run:
        log.document({"steps": [asdict(step) for step in steps]})
        cached.show(context, steps)
        return 0
    if cached.makes(todo, steps, PackResult):
        recipe.host(context.platform)  # before anything is fetched
    context.store.sweep()
    cached.run(context, todo, planned=steps)
    result, folder = item.result, context.dist / "packs"
    wheel = folder / result.file
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        publish.link(item.path / result.file, wheel)
    path = str(wheel.relative_to(project.root))
    log.heading(f"{counted(len(result.modules), 'module')}, {human_bytes(wheel.stat().st_size)}")
    log.info(path)
    log.document({**asdict(result), "file": path})
    return 0
