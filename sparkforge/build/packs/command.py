"""`build.py packs`: FlashInfer's modules for a target → a wheel below dist/TARGET/packs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, cast

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from sparkforge.build import cached, publish
from sparkforge.build.context import Context
from sparkforge.build.options import OutputOptions, SourceName, platform_of, source_plan
from sparkforge.build.packs import modules, toolchain
from sparkforge.build.packs.modules import SETS, Module, Set
from sparkforge.build.packs.names import UPSTREAM
from sparkforge.build.results import PackResult
from sparkforge.build.stages.packs import packs_item
from sparkforge.build.stages.trees import tree_of
from sparkforge.core.disk import disk_errors
from sparkforge.core.log import counted, human_bytes, log
from sparkforge.sources.project import Project, ProjectOptions

FOLDER = "packs"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``packs``."""

    target: str
    """target to compile for: spark or rtx"""
    set: Annotated[str, Parameter(choices=SETS)] = "default"
    """default: what the profiles' defaults load; all: what --moe-backend flashinfer_cutlass,
    --kv-cache-dtype fp8 and --block-size load, too"""
    module: tuple[str, ...] = ()
    """only this module, see --list"""
    list: bool = False
    """list the modules and exit"""
    dry_run: bool = False
    """print the plan and exit"""
    jobs: PositiveInt | None = None
    """parallel compilers (default: as many as fit in memory)"""
    source: SourceName = None
    """release files; git: commits of the pinned tags; auto: git, or release files if git is
    unreachable (default: targets.NAME.source in pins.yaml)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Compile the modules that the store lacks, and link the wheel into dist/.

    Raises:
        UsageError: the target has no GPU, or there is no such module.
        MachineError: not a dry run, and this machine lacks the C++ compiler for the target.
        BuildError: a compiler fails.
    """
    chosen = modules.chosen(cast("Set", options.set), options.module)
    project = Project.open(options.project)
    start = time.monotonic()
    context = _context(project, options)
    if options.list:
        return _list(chosen)
    item = packs_item(context, tree_of(context, UPSTREAM), chosen, options.jobs)
    todo = cached.ordered([item])
    steps = cached.plan(context, todo)
    if options.dry_run:
        if options.output.json:
            log.json({"steps": [asdict(step) for step in steps]})
        else:
            cached.show(context, steps)
        return 0
    if cached.makes(todo, steps, PackResult):
        toolchain.host(context.platform)  # before anything is fetched
    context.store.sweep()
    cached.run(context, todo, planned=steps)
    result = item.result
    folder = project.root / "dist" / options.target / FOLDER
    from filelock import FileLock  # not needed by a plan

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for old in folder.glob("*.whl"):
                old.unlink()
            publish.link(item.path / result.file, folder / result.file)
    size = human_bytes((folder / result.file).stat().st_size)
    log.heading(
        f"{counted(len(result.modules), 'module')} for {context.target_name}, {size}, in"
        f" {time.monotonic() - start:.0f} s"
    )
    path = str((folder / result.file).relative_to(project.root))
    log.info(path)
    log.document({**asdict(result), "file": path})
    return 0


def _context(project: Project, options: Options) -> Context:
    target = project.pins.target(options.target)
    plan = source_plan(options.source, project.access, target.source)
    context = Context.of(project, options.target, platform_of(target))
    return replace(context, source=plan)


def _list(chosen: Sequence[Module]) -> int:
    log.document({module.name: asdict(module) for module in chosen})
    for module in chosen:
        log.info(f"{module.name}{f'  [{module.needs}]' if module.needs else ''}")
    return 0
