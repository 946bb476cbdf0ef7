"""The build that a command line names: target, store, sources and engine, checked together."""

import os
import platform
from collections.abc import Sequence
from dataclasses import replace

from sparkforge.build import publish, receipt
from sparkforge.build.context import STAGES, Context, Serving, Tools
from sparkforge.build.graph import Build
from sparkforge.build.options import (
    ServerOptions,
    ToolOptions,
    VariantOptions,
    platform_of,
    source_plan,
)
from sparkforge.core.errors import MachineError, UsageError
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import engine
from sparkforge.sources.project import Project

_TOOLS, _SERVER = ToolOptions(), ServerOptions()


def build_of(
    project: Project,
    name: str,
    variant: VariantOptions,
    until: str,
    force: Sequence[str] = (),
    *,
    tools: ToolOptions = _TOOLS,
    server: ServerOptions = _SERVER,
    arguments: tuple[str, ...] = (),
    plan_only: bool = False,
) -> Build:
    """Return the build that a command's options name; ``arguments``: of ``vllm serve``.

    ``plan_only``: nothing will be made, so neither an engine nor the right machine is needed.
    """
    target = project.pins.target(name)
    plan = source_plan(variant.source, project.access, target.source)
    pack = pack_of(variant, target)
    made_with = _tools(project.pins, name, variant, tools, until, plan_only=plan_only)
    context = Context.of(project, name, platform_of(target))
    context = replace(context, source=plan, wheels=variant.wheels or "overlay", pack=pack)
    # a busy machine gets as much longer as there are processes that wait for a core
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    timeout_s = server.ready_timeout or Serving.ready_timeout_s * busy
    serving = Serving(server.port, timeout_s, arguments)
    if not plan_only:  # a plan changes nothing
        context.store.sweep()
    return Build(context, made_with, serving, frozenset(force))


def pack_of(variant: VariantOptions, target: pins.Target) -> tuple[str, ...]:
    """Return FlashInfer's modules that are compiled: --pack, else the target's."""
    if variant.pack is None:
        return target.pack
    return () if variant.pack == "none" else (variant.pack,)


def _tools(
    all_pins: pins.Pins,
    name: str,
    variant: VariantOptions,
    tools: ToolOptions,
    until: str,
    *,
    plan_only: bool,
) -> Tools:
    """Choose engine, base and builder; refuse what this machine cannot make."""
    builds = STAGES.index(until) >= STAGES.index("image")
    compiles = variant.wheels == "compile"
    if not (builds or compiles):
        return Tools(jobs=tools.jobs)
    target = all_pins.target(name)
    wanted, machine = platform_of(target), platform.machine()
    elsewhere = MACHINES.get(machine) != wanted
    not_here = f"target {name} is for {wanted}; this machine is {machine}"
    if elsewhere and compiles and (builds or not plan_only):
        remedy = "compile there; here use --wheels overlay, or --dry-run --until wheelhouse"
        raise UsageError(not_here, remedy)
    pinned = None if target.base is None else all_pins.images[target.base]
    reference = None if pinned is None else f"{pinned.repository}@{pinned.digest(wanted)}"
    base = variant.base or reference
    chosen = None
    if not (elsewhere and compiles):
        chosen, why = engine.choose(variant.engine, variant.base, reference)
        if compiles and chosen is None and not plan_only:
            msg = f"compiling wheels needs a container, but this would use {why}"
            remedy = (
                f"start Docker Engine {engine.OLDEST_ENGINE} or newer, and give a base (--base"
                " IMAGE) if none is pinned; or use --wheels overlay, which needs neither"
            )
            raise MachineError(msg, remedy)
        if elsewhere and builds and chosen is None:  # an environment is this machine's own
            remedy = (
                "build there; or an image here, with a container engine and a base image (--base);"
                f" or stop earlier: build.py --target {name} --until wheelhouse"
            )
            raise UsageError(f"{not_here}, and would build {why}", remedy)
        log.info(f"builds {why}" if builds else f"compiles with {why}")
    if chosen is None and not plan_only and tools.ca_bundle is not None:
        msg = "--ca-bundle needs a container engine"
        raise UsageError(msg, "use --engine docker, or omit it")
    if tools.ca_bundle is not None and not tools.ca_bundle.is_file():
        msg = f"--ca-bundle {tools.ca_bundle}: no such file"
        raise UsageError(msg, "give a PEM file of certificates")
    resolved = None
    if base is not None and (chosen is not None or compiles):
        resolved = engine.resolve(base, chosen)
    if chosen is not None and resolved is not None:
        engine.check_builder(chosen, resolved.reference, wanted)
    return Tools(chosen, resolved, tools.ca_bundle, tools.jobs)


def last_build(
    project: Project,
    name: str,
    variant: VariantOptions,
    server: ServerOptions,
    arguments: tuple[str, ...],
) -> Build:
    """Return a target's last build up to its image, for a command that serves it."""
    variant = last_variant(project, name, variant)
    return build_of(project, name, variant, "image", server=server, arguments=arguments)


def last_variant(project: Project, name: str, variant: VariantOptions) -> VariantOptions:
    """Complete a variant with the options of a target's last build."""
    written = receipt.load(project.root / "dist" / name / receipt.NAME)
    last = VariantOptions() if written is None else written.run.options
    engine_too = variant.engine == "auto" and variant.base is None
    return replace(
        variant,
        engine=last.engine if engine_too else variant.engine,
        base=last.base if engine_too else variant.base,
        wheels=variant.wheels or last.wheels,
        pack=variant.pack or last.pack,
        source=variant.source or (None if project.access.mirrors else last.source),
    )


def options_of(build: Build, engine: str) -> VariantOptions:
    """Return the options that give a build like this one again; ``engine``: value of --engine."""
    context, base = build.context, build.tools.base
    image = publish.image_of(build) is not None
    return VariantOptions(
        engine="none" if engine == "none" else "auto",
        base=base.reference if image and base is not None else None,
        wheels=context.wheels if context.wheels == "compile" else None,
        # a mirror makes the sources of upstreams differ
        source=None if context.access.mirrors else context.source,
        pack=None if context.pack == context.target.pack else " ".join(context.pack) or "none",
    )
