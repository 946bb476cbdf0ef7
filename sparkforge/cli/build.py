"""build, explain, smoke."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from sparkforge.build import cached, publish, receipt
from sparkforge.build.context import PLANNED, STAGES
from sparkforge.build.graph import Build
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    ToolOptions,
    VariantOptions,
    platform_of,
)
from sparkforge.build.packs import recipe
from sparkforge.build.results import EnvironmentResult, PackResult
from sparkforge.build.setup import build_of, last_variant, options_of
from sparkforge.core import disk, plain
from sparkforge.core.errors import MachineError, UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import environment
from sparkforge.sources.project import Project, ProjectOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of ``build``."""

    target: str
    """target to build, from pins.yaml"""
    until: Annotated[str, Parameter(choices=STAGES)] = STAGES[-1]
    """stop after this stage"""
    force: Annotated[tuple[str, ...], Parameter(choices=STAGES)] = ()
    """run this stage again even if its result is in the store"""
    dry_run: bool = False
    """print the plan and exit"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()
    server: ServerOptions = ServerOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Options of ``explain``."""

    target: str
    """target to explain"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SmokeOptions:
    """Options of ``smoke``."""

    target: str
    """target to test"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


def build_target(options: BuildOptions) -> int:
    """Build a target as the options say."""
    return _build(Project.open(options.project), options)


def _build(project: Project, options: BuildOptions, arguments: tuple[str, ...] = ()) -> int:
    """Make what the store lacks, publish under dist/, print the receipt.

    Args:
        arguments: of ``vllm serve`` for the smoke test; with any, dist/ stays as it is.
    """
    start, until = time.monotonic(), options.until
    tested = project.pins.target(options.target).smoke is not None and until == STAGES[-1]
    if not tested and (arguments or options.server != ServerOptions()):
        msg = "--port and --ready-timeout are for the smoke test, which this build does not run"
        raise UsageError(msg, "omit them; serve takes them, too")
    if options.dry_run:
        return _dry_run(project, options)
    build = build_of(
        *(project, options.target, options.variant, until, options.force),
        tools=options.tools,
        server=options.server,
        arguments=arguments,
    )
    context, todo, planned = build.context, build.graph.until(until), build.plan(until)
    count = f"{sum(one.made for one in planned)} of {len(planned)} items to build"
    log.heading(f"{context.target_name} on {context.platform}: {count}")
    # before anything else is fetched
    if cached.makes(todo, planned, EnvironmentResult):
        offline = context.access.offline
        environment.ensure_python(context.store, context.target.python, offline=offline)
    if cached.makes(todo, planned, PackResult):
        try:
            recipe.host(context.platform)
        except MachineError as error:
            raise MachineError(error.what, f"{error.remedy}; or: --pack none") from error
    build.run(until, planned)

    def written() -> receipt.Receipt:
        seconds = time.monotonic() - start
        return receipt.of(context, todo, seconds, options_of(build, options.variant.engine))

    built = written()
    if not arguments:
        if publish.reads_damage(build, built):
            cached.run(context, todo, {build.graph.house.stage})
            built = written()
        seconds = time.monotonic() - start
        folder, built = publish.publish(build, built)
        publish.summary(build, todo, folder, seconds)
    log.document(plain.as_json(built))
    return 0


def _is_here(project: Project, name: str) -> bool:
    return MACHINES.get(platform.machine()) == platform_of(project.pins.target(name))


def _dry_run(project: Project, options: BuildOptions) -> int:
    """Show the plan; if this machine cannot make all of it, the possible part and the reason."""
    until, force, note = options.until, options.force, ""

    def chosen() -> Build:
        given = (project, options.target, options.variant, until, force)
        return build_of(*given, tools=options.tools, plan_only=True)

    try:
        build = chosen()
    except (UsageError, MachineError) as error:
        stages = STAGES[: STAGES.index(PLANNED) + 1]
        if _is_here(project, options.target) or until in stages:
            raise
        until, note = PLANNED, f"later stages cannot run here: {error.what}; {error.remedy}"
        force = tuple(stage for stage in force if stage in stages)
        build = chosen()
    context, planned = build.context, build.plan(until)
    document = {
        "plan": [asdict(one) for one in planned],
        "fetches": cached.total(planned),
        "until": until,
        "source": context.source,
    }
    log.document({**document, "note": note} if note else document)
    log.heading(f"plan for {context.target_name} on {context.platform}, up to {until}")
    cached.show(context, planned)
    free = disk.free(context.store.root)
    log.info(f"disk: {human_bytes(free)} free for the store in {context.store.root}")
    if note:
        log.info(note)
    return 0


def explain(options: ExplainOptions) -> int:
    """Print for each item whether it would be built again, and which input changed."""
    project = Project.open(options.project)
    variant = last_variant(project, options.target, options.variant)
    here = _is_here(project, options.target)
    until = STAGES[-1] if here else PLANNED
    build = build_of(project, options.target, variant, until, plan_only=True)
    planned, source = build.plan(until), build.context.source
    log.document({"explain": [asdict(one) for one in planned], "source": source})
    if not here:
        log.info(f"up to the {until}: the later stages run on {build.context.platform}")
    cached.show(build.context, planned)
    return 0


def smoke(options: SmokeOptions) -> int:
    """Run the smoke test again; builds the product first if it is missing."""
    project = Project.open(options.project)
    again = BuildOptions(
        target=options.target,
        force=("smoke",),
        project=options.project,
        output=options.output,
        variant=last_variant(project, options.target, options.variant),
        server=options.server,
    )
    return _build(project, again, options.arguments)
