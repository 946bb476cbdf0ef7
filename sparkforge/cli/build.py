"""build, explain."""

import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sparkforge.build import cached, publish, receipt, remote
from sparkforge.build.context import PLANNED, STAGES
from sparkforge.build.graph import build_of, last_variant
from sparkforge.build.options import (
    ServerOptions,
    ServingOptions,
    StoreOptions,
    ToolOptions,
    VariantOptions,
    command_options,
    platform_of,
)
from sparkforge.build.packs import recipe
from sparkforge.core import plain
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.sources.project import Project
from sparkforge.store.store import Store


@command_options
class BuildOptions(ServingOptions):
    target: str
    """target to build, from pins.yaml"""
    until: Annotated[str, Parameter(choices=STAGES)] = STAGES[-1]
    """stop after this stage"""
    force: Annotated[tuple[str, ...], Parameter(choices=STAGES)] = ()
    """run this stage again even if its result is in the store"""
    dry_run: bool = False
    """print the plan and exit"""
    remote: str | None = None
    """URL or path of another machine's store: take wheels and downloads from there"""
    tools: ToolOptions = ToolOptions()


@command_options
class ExplainOptions(StoreOptions):
    target: str
    """target to explain"""
    variant: VariantOptions = VariantOptions()


def build_target(options: BuildOptions) -> int:
    """Make what the store lacks, publish under dist/, print the receipt.

    With arguments of ``vllm serve`` for the smoke test, dist/ stays as it is.
    """
    project, arguments, until = Project.open(options.project), options.arguments, options.until
    tested = project.pins.target(options.target).smoke is not None and until == STAGES[-1]
    if not tested and (arguments or options.server != ServerOptions()):
        msg = "--port, --ready-timeout and -- are for the smoke test, which this build does not run"
        raise UsageError(msg, "omit them; serve takes them, too")
    if options.dry_run:
        return _plan(project, options)
    if options.remote is not None:
        if project.access.offline:
            raise UsageError("--remote and --offline conflict", "omit one of them")
        url = options.remote if "://" in options.remote else Path(options.remote).resolve().as_uri()
        project = replace(project, store=Store(project.store.root, url.rstrip("/")))
        remote.check(project.store)
    log.document(plain.as_json(made(project, options)))
    return 0


def made(project: Project, options: BuildOptions) -> receipt.Receipt:
    """Build and publish what options name; returns the receipt."""
    start, until, arguments = time.monotonic(), options.until, options.arguments
    build = build_of(
        *(project, options.target, options.variant, until, options.force),
        tools=options.tools,
        server=options.server,
        arguments=arguments,
    )
    context, todo, planned = build.context, build.graph.until(until), build.plan(until)
    count = f"{sum(one.made for one in planned)} of {len(planned)} items to build"
    log.heading(f"{context.target_name} on {context.platform}: {count}")
    if any(one.made and one.stage == "packs" for one in planned):  # before anything is fetched
        recipe.host(context.platform)
    build.run(until, planned)
    built = receipt.of(context, todo, time.monotonic() - start, options.variant)
    if not arguments:
        folder, built = publish.publish(build, built)
        publish.summary(build, todo, folder, time.monotonic() - start)
    return built


def explain(options: ExplainOptions) -> int:
    """Print for each item whether it would be built again, and which input changed."""
    project = Project.open(options.project)
    variant = last_variant(project, options.target, options.variant)
    return _plan(project, BuildOptions(target=options.target, variant=variant))


def _plan(project: Project, options: BuildOptions) -> int:
    """Show a plan, for a target of another platform that of the stages that run here."""
    here = MACHINES.get(platform.machine()) == platform_of(project.pins.target(options.target))
    last = options.until if here else min(options.until, PLANNED, key=STAGES.index)
    force = [stage for stage in options.force if stage in STAGES[: STAGES.index(last) + 1]]
    build = build_of(
        *(project, options.target, options.variant, last, force),
        tools=options.tools,
        plan_only=True,
    )
    context, planned = build.context, build.plan(last)
    plan, total = [asdict(one) for one in planned], cached.total(planned)
    log.document({"plan": plan, "fetches": total, "until": last, "source": context.source})
    log.heading(f"plan for {context.target_name} on {context.platform}, up to {last}")
    cached.show(context, planned)
    if last != options.until:
        log.info(f"the later stages run on {context.platform}")
    return 0
