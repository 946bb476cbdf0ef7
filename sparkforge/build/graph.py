"""The results of a target and their needs: a build's choices → a graph of ``Cached``."""

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
    OwnWheel,
    PackResult,
    PluginResult,
    Product,
    SmokeResult,
    WheelhouseResult,
    WheelResult,
)
from sparkforge.build.stages.kernels import kernels_item, plugin_item
from sparkforge.build.stages.product import environment_item, image_item, note_of, smoke_item
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.build.stages.trees import Tree, tree_of
from sparkforge.build.stages.wheels import overlay_item
from sparkforge.runtime.engine import BaseImage


class Graph:
    """The results of a target; all but ``product`` and ``smoke`` are what the product is made of.

    Attributes:
        trees, wheels: by upstream.
        kernels, plugin: None where pins.yaml has no plugin.
        pack: FlashInfer's modules, compiled ahead of time.
        product: the image, or the virtual environment.
        smoke: None where the target has no smoke test.
    """

    def __init__(self, context: Context, tools: Tools, serving: Serving) -> None:
        target, pin = context.target, context.pins.plugin
        layers = dict.fromkeys(one for name in target.wheels for one in context.layers(name))
        self.trees: dict[str, Tree] = {layer: tree_of(context, layer) for layer in layers}
        self.wheels: Mapping[str, Cached[WheelResult]]
        if context.wheels == "compile":
            from sparkforge.build.stages import natives  # not needed by overlays

            self.wheels = natives.compiled(context, tools, self.trees)
        else:
            self.wheels = {name: overlay_item(context, name, self.trees) for name in target.wheels}
        self.kernels: Cached[FilesResult] | None = None
        self.plugin: Cached[PluginResult] | None = None
        if pin is not None:
            self.kernels = kernels_item(context, pin)
            self.plugin = plugin_item(context, pin, self.kernels)
        self.house: Cached[WheelhouseResult] = wheelhouse_item(context)
        self.pack: Cached[PackResult] | None = None
        if context.pack:
            from sparkforge.build.packs import modules  # not needed by targets without a GPU
            from sparkforge.build.packs.pack import packs_item

            tree = self.trees.get(modules.UPSTREAM)
            self.pack = packs_item(context, tree, modules.pinned(context.pack), tools.jobs)
        self.product: Cached[Product]
        unpatched = None
        if tools.engine is not None and tools.base is not None:
            self.product = image_item(context, tools, tools.engine, tools.base, self)
        else:
            self.product = environment_item(context, self.own, self.house, "environment")
            # with arguments of the user's there is no proof: it is about the target as it is
            if not serving.arguments:
                unpatched = unpatched_environment(context, self.house)
        self.smoke: Cached[SmokeResult] | None = None
        if target.smoke is not None:
            self.smoke = smoke_item(context, tools, serving, self, unpatched)

    @property
    def own(self) -> tuple[Cached[OwnWheel], ...]:
        """The wheels that the build makes."""
        others = (self.plugin, self.pack)
        return (*self.wheels.values(), *(item for item in others if item is not None))

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
        """Its results; PinsError, BuildError, UsageError if there are none by pins.yaml."""
        return Graph(self.context, self.tools, self.serving)

    def plan(self, until: str) -> list[Planned]:
        """Return what ``run`` would do."""
        return cached.plan(self.context, self.graph.until(until), self.force)

    def run(self, until: str, planned: Sequence[Planned] | None = None) -> list[Cached[Any]]:
        """Make what the store lacks up to and with a stage; returns all results in order."""
        items = self.graph.until(until)
        cached.run(self.context, items, self.force, planned)
        return items


def graph_of(context: Context) -> Graph:
    """Return the results of a target without an engine."""
    return Build(context).graph


def unpatched_environment(
    context: Context, house: Cached[WheelhouseResult] | None = None
) -> Cached[EnvironmentResult]:
    """Return the release without our series, in a virtual environment."""
    wheels = [overlay_item(context, name, None) for name in context.target.wheels]
    house = house or wheelhouse_item(context)
    return environment_item(context, wheels, house, f"environment ({UNPATCHED})", release=True)


def inputs_of_image(context: Context, base: BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of a target's image and its parts, as the image holds them."""
    return note_of(context, Build(context, Tools(base=base)).graph, base)
