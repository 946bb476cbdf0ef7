"""`build.py packs`: FlashInfer's modules for a target → a wheel below dist/TARGET/packs."""

import shutil
from dataclasses import asdict

from sparkforge.build import cached, publish
from sparkforge.build.context import Context
from sparkforge.build.options import OutputOptions, command_options, platform_of
from sparkforge.build.packs import recipe
from sparkforge.build.packs.modules import UPSTREAM, pinned
from sparkforge.build.packs.pack import packs_item
from sparkforge.build.stages.wheels import tree_of
from sparkforge.core.disk import disk_errors
from sparkforge.core.log import log
from sparkforge.sources.project import Project, ProjectOptions


@command_options
class Options:
    """Options of ``packs``."""

    target: str
    """target to compile for: spark or rtx"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Compile the modules of a target's pack, and link the wheel into dist/."""
    project = Project.open(options.project)
    context = Context.of(project, options.target, platform_of(project.pins.target(options.target)))
    item = packs_item(context, tree_of(context, UPSTREAM), pinned(context.pack or ("default",)))
    recipe.host(context.platform)  # before anything is fetched
    cached.run(context, cached.ordered([item]))
    wheel = context.dist / "packs" / item.result.file
    with disk_errors(wheel.parent):
        shutil.rmtree(wheel.parent, ignore_errors=True)
        wheel.parent.mkdir(parents=True)
        publish.link(item.path / wheel.name, wheel)
    path = str(wheel.relative_to(project.root))
    log.info(path)
    log.document({**asdict(item.result), "file": path})
    return 0
