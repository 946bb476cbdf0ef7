"""A command's options → a build, and the graph of ``Cached`` results that it makes."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sparkforge.build import cached, receipt
from sparkforge.build.cached import Cached, Planned, ordered, result_of
from sparkforge.build.context import STAGES, Context, Tools
from sparkforge.build.image import environment_item, image_item, note_of, smoke_item
from sparkforge.build.options import ServerOptions, ToolOptions, VariantOptions, platform_of
from sparkforge.build.results import ImageResult, OwnWheel, PackResult, Product, WheelResult
from sparkforge.build.stages.kernels import kernels_item, plugin_item
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.build.stages.wheels import overlay_item, tree_of
from sparkforge.core.errors import MachineError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.pins import Pins, Target
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import engine
from sparkforge.sources.project import Project

_TOOLS, _SERVER = ToolOptions(), ServerOptions()


class Graph:
    """The results of a target; all but ``product`` and ``smoke`` are what the product is made of.

    ``trees`` and ``wheels`` are by upstream; what a target does not have is None.
    """

    def __init__(self, context: Context, tools: Tools) -> None:
        target, pin = context.target, context.pins.plugin
        layers = dict.fromkeys(one for name in target.wheels for one in context.layers(name))
        self.trees = {layer: tree_of(context, layer) for layer in layers}
        self.wheels: Mapping[str, Cached[WheelResult]]
        if context.wheels == "compile":
            from sparkforge.build.stages import natives  # not needed by overlays

            self.wheels = natives.compiled(context, tools, self.trees)
        else:
            self.wheels = {name: overlay_item(context, name, self.trees) for name in target.wheels}
        self.kernels = kernels_item(context, pin) if pin else None
        self.plugin = plugin_item(context, pin, self.kernels) if pin and self.kernels else None
        self.house = wheelhouse_item(context)
        self.pack: Cached[PackResult] | None = None
        if context.pack:
            from sparkforge.build.packs import modules  # not needed by targets without a GPU
            from sparkforge.build.packs.pack import packs_item

            tree = self.trees.get(modules.UPSTREAM)
            self.pack = packs_item(context, tree, modules.pinned(context.pack), tools.jobs)
        self.product: Cached[Product]
        if tools.engine is not None and tools.base is not None:
            self.product = image_item(context, tools, tools.engine, tools.base, self)
        else:
            self.product = environment_item(context, self.own, self.house)
        self.smoke = smoke_item(context, tools, self) if target.smoke else None

    @property
    def own(self) -> tuple[Cached[OwnWheel], ...]:
        """The wheels that the build makes."""
        return (*self.wheels.values(), *filter(None, (self.plugin, self.pack)))

    def until(self, stage: str) -> list[Cached[Any]]:
        """Return what a build makes up to and with a stage, in order."""
        last = STAGES.index(stage)
        every = ordered([self.product if self.smoke is None else self.smoke])
        return [item for item in every if STAGES.index(item.stage) <= last]


@dataclass(frozen=True)
class Build:
    """One build: what, with which tools, and what is made again although the store has it."""

    context: Context
    tools: Tools = field(default_factory=Tools)
    force: frozenset[str] = frozenset()
    """Stages."""

    @cached_property
    def graph(self) -> Graph:
        """Its results; PinsError, BuildError, UsageError if there are none by pins.yaml."""
        return Graph(self.context, self.tools)

    @property
    def image(self) -> ImageResult | None:
        """The image; None where it made none."""
        result = result_of(self.graph.product)
        return result if isinstance(result, ImageResult) else None

    def plan(self, until: str) -> list[Planned]:
        """Return what ``run`` would do."""
        return cached.plan(self.context, self.graph.until(until), self.force)

    def run(self, until: str, planned: Sequence[Planned] | None = None) -> list[Cached[Any]]:
        """Make what the store lacks up to and with a stage; returns all results in order."""
        items = self.graph.until(until)
        cached.run(self.context, items, self.force, planned)
        return items


def inputs_of_image(context: Context, base: engine.BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of a target's image and its parts, as the image holds them."""
    return note_of(context, Build(context, Tools(base=base)).graph, base)


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
    made_with = _tools(project.pins, target, variant, tools, until, plan_only=plan_only)
    pack = target.pack if variant.pack is None else (variant.pack,)
    context = replace(
        Context.of(project, name, platform_of(target)),
        source=variant.source or target.source,
        wheels=variant.wheels or "overlay",
        pack=() if variant.pack == "none" else pack,
    )
    # a busy machine gets as much longer as there are processes that wait for a core
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    timeout_s = server.ready_timeout or Tools.ready_timeout_s * busy
    if not plan_only:  # a plan changes nothing
        context.store.sweep()
    made_with = replace(made_with, port=server.port, ready_timeout_s=timeout_s, arguments=arguments)
    return Build(context, made_with, frozenset(force))


def _tools(
    all_pins: Pins,
    target: Target,
    variant: VariantOptions,
    tools: ToolOptions,
    until: str,
    *,
    plan_only: bool,
) -> Tools:
    """Choose engine and base; refuse what this machine cannot make."""
    builds, compiles = STAGES.index(until) >= STAGES.index("image"), variant.wheels == "compile"
    if not (builds or compiles):
        return Tools(jobs=tools.jobs)
    wanted, machine = platform_of(target), platform.machine()
    elsewhere = MACHINES.get(machine) != wanted
    pinned = None if target.base is None else all_pins.images[target.base]
    reference = None if pinned is None else f"{pinned.repository}@{pinned.digest(wanted)}"
    chosen, why = engine.choose(variant.engine, variant.base, reference)
    if elsewhere and (compiles or chosen is None):  # an environment is this machine's own
        msg = f"the target is for {wanted}; this machine is {machine}, and would build {why}"
        hint = "build there; here: --until wheelhouse, or an image of overlay wheels (--base)"
        raise UsageError(msg, hint)
    if compiles and chosen is None and not plan_only:
        msg = f"compiling wheels needs a container, but this would use {why}"
        hint = f"start Docker Engine {engine.OLDEST_ENGINE} or newer, and give --base if none is"
        raise MachineError(msg, f"{hint} pinned; --wheels overlay needs neither")
    if chosen is None and tools.ca_bundle is not None:
        raise UsageError("--ca-bundle needs a container engine", "use --engine docker, or omit it")
    log.info(f"builds {why}" if builds else f"compiles with {why}")
    base, resolved = variant.base or reference, None
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
    return VariantOptions(
        source=variant.source or last.source,
        engine=last.engine if engine_too else variant.engine,
        base=last.base if engine_too else variant.base,
        wheels=variant.wheels or last.wheels,
        pack=variant.pack or last.pack,
    )
