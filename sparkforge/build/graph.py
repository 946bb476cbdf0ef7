"""The results of a target and their needs: a build's choices → a graph of ``Cached``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sparkforge.build import cached
from sparkforge.build.cached import Cached, Planned, ordered
from sparkforge.build.context import STAGES, UNPATCHED, Context, Serving, Tools
from sparkforge.build.results import (
    EnvironmentResult,
    FilesResult,
    Product,
    SmokeResult,
    WheelhouseResult,
    WheelResult,
)
from sparkforge.build.stages.kernels import kernels_item, plugin_item
from sparkforge.build.stages.product import (
    Parts,
    environment_item,
    image_item,
    note_of,
    smoke_item,
)
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.build.stages.trees import Tree, tree_of
from sparkforge.build.stages.wheels import overlay_item
from sparkforge.runtime.engine import BaseImage


@dataclass(frozen=True)
class Graph(Parts):
    """The results of a target; those of ``Parts`` are what its product is made of."""

    trees: Mapping[str, Tree]
    """By upstream."""
    kernels: Cached[FilesResult] | None
    """Of the plugin; None where pins.yaml has none."""
    product: Cached[Product]
    """The image, or the virtual environment."""
    smoke: Cached[SmokeResult] | None
    """None where the target has no smoke test."""

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
    serving: Serving = field(default_factory=Serving)
    force: frozenset[str] = frozenset()
    """Stages."""

    @cached_property
    def graph(self) -> Graph:
        """Its results; raises what ``graph_of`` does."""
        return graph_of(self.context, self.tools, self.serving)

    def plan(self, until: str) -> list[Planned]:
        """Return what ``run`` would do."""
        return cached.plan(self.context, self.graph.until(until), self.force)

    def run(self, until: str, planned: Sequence[Planned] | None = None) -> list[Cached[Any]]:
        """Make what the store lacks up to and with a stage; returns all results in order."""
        items = self.graph.until(until)
        cached.run(self.context, items, self.force, planned)
        return items


def graph_of(context: Context, tools: Tools | None = None, serving: Serving | None = None) -> Graph:
    """Return the results of a build's target."""
    tools, serving = tools or Tools(), serving or Serving()
    trees: dict[str, Tree] = {}
    wheels: dict[str, Cached[WheelResult]] = {}
    for name in context.target.wheels:
        trees |= {layer: tree_of(context, layer) for layer in context.layers(name)}
    if context.wheels == "compile":
        from sparkforge.build.compile import inputs, natives  # not needed by overlays

        builder = inputs.builder_item(context, tools)
    for name in context.target.wheels:
        layers = {layer: trees[layer] for layer in context.layers(name)}
        if context.wheels == "compile":
            wheels[name] = natives.compile_item(context, tools, name, builder, layers)
        else:
            wheels[name] = overlay_item(context, name, layers)
    pin = context.pins.plugin
    kernels = None if pin is None else kernels_item(context, pin)
    plugin = None if pin is None or kernels is None else plugin_item(context, pin, kernels)
    house = wheelhouse_item(context)
    pack = None
    if context.pack:
        from sparkforge.build.packs import modules  # not needed by targets without a GPU
        from sparkforge.build.packs.pack import packs_item

        chosen = modules.pinned(context.pack, f"targets.{context.target_name}.pack")
        pack = packs_item(context, trees.get(modules.UPSTREAM), chosen, tools.jobs)
    parts = Parts(wheels, plugin, pack, house)
    product: Cached[Product]
    unpatched = None
    if tools.engine is not None and tools.base is not None:
        product = image_item(context, tools, tools.engine, tools.base, parts)
    else:
        product = environment_item(context, parts.own, house, "environment")
        # with arguments of the user's there is no proof: it is about the target as it is
        unpatched = None if serving.arguments else unpatched_environment(context, house)
    smoke = None
    if context.target.smoke is not None:
        smoke = smoke_item(context, tools, serving, product, unpatched, wheels, trees)
    return Graph(wheels, plugin, pack, house, trees, kernels, product, smoke)


def unpatched_environment(
    context: Context, house: Cached[WheelhouseResult] | None = None
) -> Cached[EnvironmentResult]:
    """Return the release without our series, in a virtual environment."""
    wheels = [overlay_item(context, name, None) for name in context.target.wheels]
    house = house or wheelhouse_item(context)
    return environment_item(context, wheels, house, f"environment ({UNPATCHED})", release=True)


def inputs_of_image(context: Context, base: BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of a target's image and its parts, as the image holds them."""
    return note_of(context, graph_of(context, Tools(base=base)), base)
