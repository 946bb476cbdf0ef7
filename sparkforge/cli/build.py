"""build, explain, smoke."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
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
from sparkforge.build.packs import toolchain
from sparkforge.build.results import EnvironmentResult, PackResult
from sparkforge.build.setup import build_of, last_variant, options_of
from sparkforge.core import disk, plain
from sparkforge.core.errors import MachineError, UsageError
from sparkforge.core.log import human_bytes, log
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.runtime import interpreter
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
    return _build_in(Project.open(options.project), options)


def _build_in(project: Project, options: BuildOptions) -> int:
    """Make the items that the store lacks, publish under dist/, print the receipt."""
    start = time.monotonic()
    tested = project.pins.target(options.target).smoke is not None and options.until == STAGES[-1]
    if options.server != ServerOptions() and not tested:
        msg = "--port and --ready-timeout are for the smoke test, which this build does not run"
        raise UsageError(msg, "omit them; serve takes them, too")
    if options.dry_run:
        return _dry_run(options, project)
    build = build_of(
        project,
        options.target,
        options.variant,
        options.until,
        options.force,
        tools=options.tools,
        server=options.server,
    )
    context, todo = build.context, build.graph.until(options.until)
    planned = build.plan(options.until)
    log.heading(
        f"{context.target_name} on {context.platform}: {sum(one.made for one in planned)}"
        f" of {len(planned)} items to build"
    )
    if cached.makes(todo, planned, EnvironmentResult):
        # before anything else is fetched
        interpreter.ensure(context.store, context.target.python, offline=options.project.offline)
    if cached.makes(todo, planned, PackResult):
        _check_host_compiler(context.platform)  # the same
    build.run(options.until, planned)

    def written() -> receipt.Receipt:
        seconds = time.monotonic() - start
        return receipt.of(context, todo, seconds, options_of(build, options.variant.engine))

    built = written()
    if not publish.stands(build, built) and publish.reads_damage(build):
        cached.run(context, todo, {build.graph.house.stage})
        built = written()
    mention_fallback(build)
    seconds = time.monotonic() - start
    folder, built = publish.publish(build, built)
    log.document(plain.as_json(built))
    publish.summary(build, todo, folder, seconds)
    return 0


def _check_host_compiler(wanted: Platform) -> None:
    try:
        toolchain.host(wanted)
    except MachineError as error:
        raise MachineError(error.what, f"{error.remedy}; or: --pack none") from error


def _dry_run(options: BuildOptions, project: Project) -> int:
    """Show the plan; if this machine cannot make all of it, the possible part and the reason."""
    until, note = options.until, ""

    def chosen(until: str, force: Sequence[str]) -> Build:
        return build_of(
            project,
            options.target,
            options.variant,
            until,
            force,
            tools=options.tools,
            plan_only=True,
        )

    try:
        build = chosen(until, options.force)
    except (UsageError, MachineError) as error:
        target = project.pins.target(options.target)
        here = MACHINES.get(platform.machine()) == platform_of(target)
        if here or STAGES.index(until) <= STAGES.index(PLANNED):
            raise
        until, note = PLANNED, f"later stages cannot run here: {error.what}; {error.remedy}"
        force = [stage for stage in options.force if STAGES.index(stage) <= STAGES.index(until)]
        build = chosen(until, force)
    context, planned = build.context, build.plan(until)
    if options.output.json:
        document = {
            "plan": [asdict(one) for one in planned],
            "fetches": cached.total(planned),
            "until": until,
            "source": context.source,
        }
        log.json({**document, "note": note} if note else document)
        return 0
    log.heading(f"plan for {context.target_name} on {context.platform}, up to {until}")
    cached.show(context, planned)
    free = disk.free(context.store.root)
    log.info(f"disk: {human_bytes(free)} free for the store in {context.store.root}")
    if note:
        log.info(note)
    return 0


def mention_fallback(build: Build) -> None:
    """Name the sources that an earlier build took from release files instead of commits."""
    names = [
        name
        for name, item in build.graph.sources.items()
        if item.found is not None
        and not item.made_now
        and item.result.provider == "release" != item.inputs["provider"]
    ]
    if names:
        log.info(
            f"sources of {', '.join(names)}: release files, because git was unreachable when they"
            " were fetched; retry with --force sources"
        )


def explain(options: ExplainOptions) -> int:
    """Print for each item whether it would be built again, and which input changed."""
    project = Project.open(options.project)
    variant = last_variant(project, options.target, options.variant)
    target = project.pins.target(options.target)
    here = MACHINES.get(platform.machine()) == platform_of(target)
    until = STAGES[-1] if here else PLANNED
    build = build_of(project, options.target, variant, until, plan_only=True)
    context, planned = build.context, build.plan(until)
    if not here:
        log.info(f"up to the {until}: the later stages run on {context.platform}")
    if options.output.json:
        log.json(
            {
                "explain": [asdict(one) for one in planned],
                "source": context.source,
            }
        )
    else:
        cached.show(context, planned)
    return 0


def smoke(options: SmokeOptions) -> int:
    """Run the smoke test again; builds the product first if it is missing."""
    project = Project.open(options.project)
    variant = last_variant(project, options.target, options.variant)
    if options.arguments:
        return _smoke_with_arguments(options, project, variant)
    return _build_in(
        project,
        BuildOptions(
            target=options.target,
            force=("smoke",),
            project=options.project,
            output=options.output,
            variant=variant,
            tools=ToolOptions(),
            server=options.server,
        ),
    )


def _smoke_with_arguments(options: SmokeOptions, project: Project, variant: VariantOptions) -> int:
    """Run the smoke test with the user's arguments of ``vllm serve``; dist/ stays as it is."""
    start = time.monotonic()
    build = build_of(
        project,
        options.target,
        variant,
        STAGES[-1],
        ["smoke"],
        server=options.server,
        arguments=options.arguments,
    )
    if build.context.target.smoke is None:
        msg = f"target {options.target} has no smoke test"
        raise UsageError(msg, "use build.py serve --target NAME -- …")
    todo = build.run(STAGES[-1])
    built = receipt.of(build.context, todo, time.monotonic() - start, variant)
    log.document(plain.as_json(built))
    return 0
