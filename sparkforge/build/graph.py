"""The items of a target and their needs: pins and options → a graph.

Every item's inputs are known before anything runs, because pins.yaml and the patch files determine
the results of earlier stages. So a plan, ``explain`` and a build in which nothing changed
cost only hashing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from sparkforge.build.context import STAGES, UNPATCHED, Context
from sparkforge.build.imagenote import ImageNote
from sparkforge.build.item import Item
from sparkforge.build.results import (
    BuilderResult,
    EnvironmentResult,
    ExternalResult,
    KernelsResult,
    OwnWheel,
    PackResult,
    PluginResult,
    Product,
    SeriesResult,
    SmokeResult,
    SourceResult,
    WheelhouseResult,
    WheelResult,
)
from sparkforge.build.stages import image
from sparkforge.build.stages.environment import environment_item
from sparkforge.build.stages.kernels import kernels_item
from sparkforge.build.stages.patched import series_item
from sparkforge.build.stages.plugin import plugin_item
from sparkforge.build.stages.smoke import smoke_item
from sparkforge.build.stages.source import source_item
from sparkforge.build.stages.trial import trial_item
from sparkforge.build.stages.wheelhouse import wheelhouse_item
from sparkforge.build.stages.wheels import Tree, overlay_item
from sparkforge.runtime.engine import BaseImage
from sparkforge.series import series


@dataclass(frozen=True)
class Graph:
    """The items of a target."""

    sources: Mapping[str, Item[SourceResult]]
    series: Mapping[str, Item[SeriesResult]]
    """``sources``, ``series``: by upstream; a series where it has patches."""
    kernels: Item[KernelsResult] | None
    plugin: Item[PluginResult] | None
    """Our plugin for vLLM, with these kernels; None where pins.yaml has none."""
    externals: Mapping[str, Item[ExternalResult]]
    """By ``UPSTREAM/EXTERNAL``."""
    wheels: Mapping[str, Item[WheelResult]]
    pack: Item[PackResult] | None
    """FlashInfer's modules; None where none are compiled ahead of time."""
    wheelhouse: Item[WheelhouseResult]
    product: Item[Product]
    """The product: the image, or the virtual environment."""
    smoke: Item[SmokeResult] | None
    """None where the target has no smoke test."""

    @property
    def own(self) -> tuple[Item[OwnWheel], ...]:
        """The wheels that the build makes."""
        return image.own(self.wheels, self.plugin, self.pack)

    def until(self, stage: str) -> list[Item[Any]]:
        """Return the items of a build up to and with a stage, in order."""
        last = STAGES.index(stage)
        every = ordered([self.product if self.smoke is None else self.smoke])
        return [item for item in every if STAGES.index(item.stage) <= last]


def ordered(goals: Iterable[Item[Any]]) -> list[Item[Any]]:
    """Return items and all that they need, each item after its needs.

    Of the items that could come next, one of the earliest stage does: the sources of all upstreams
    come first, and nothing large is fetched before the series apply.
    """
    found: dict[Item[Any], int] = {}

    def visit(item: Item[Any]) -> None:
        for need in item.needs:
            visit(need)
        found.setdefault(item, len(found))

    for goal in goals:
        visit(goal)
    sorter = TopologicalSorter({item: item.needs for item in found})
    sorter.prepare()
    ready: list[Item[Any]] = []
    result: list[Item[Any]] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        item = min(ready, key=lambda item: (STAGES.index(item.stage), found[item]))
        ready.remove(item)
        result.append(item)
        sorter.done(item)
    return result


def graph_of(context: Context) -> Graph:
    """Return the items of a build's target.

    Raises:
        SeriesError: a series is malformed.
        BuildError: wheels are compiled, and the series changes what can't be.
        MachineError: wheels are compiled, and the target has no base image.
        UsageError: the target gets a pack, and has no GPU.
        PinsError: there is no module of a pack's name, or files of the plugin are missing.
    """
    trees: dict[str, Tree] = {}
    externals: dict[str, Item[ExternalResult]] = {}
    wheels: dict[str, Item[WheelResult]] = {}
    builder = _builder(context)
    for name in context.target.wheels:
        layers = {layer: tree_of(context, layer) for layer in context.layers(name)}
        trees |= layers
        if builder is None:
            wheels[name] = overlay_item(context, name, layers)
            continue
        from sparkforge.build.compile import inputs, natives  # not needed by overlays

        upstream, compiled = context.pins.upstream(name), natives.natives_of(context, name)
        if not compiled:
            note = upstream.compile.blocked or "its series changes no native file"
            wheels[name] = overlay_item(context, name, layers, note=note)
            continue
        needed = upstream.externals if natives.reads_externals(compiled) else ()
        fetched = {key: inputs.external_item(context, name, key) for key in needed}
        externals |= {f"{name}/{key}": item for key, item in fetched.items()}
        wheels[name] = natives.compile_item(context, name, builder, layers, fetched)
    house = wheelhouse_item(context)
    pack = _pack(context, trees)
    kernels, plugin = _plugin(context)
    parts = image.Parts(wheels, plugin, pack, house, trial_item())
    product, unpatched = _product(context, parts)
    sources = {name: tree.source for name, tree in trees.items()}
    smoke = None
    if context.target.smoke is not None:
        smoke = smoke_item(context, product, unpatched, wheels, sources)
    return Graph(
        sources,
        {name: tree.series for name, tree in trees.items() if tree.series is not None},
        kernels,
        plugin,
        externals,
        wheels,
        pack,
        house,
        product,
        smoke,
    )


def _plugin(context: Context) -> tuple[Item[KernelsResult] | None, Item[PluginResult] | None]:
    """Return the machine code of our kernels, and the wheel with it."""
    pin = context.pins.plugin
    if pin is None:
        return None, None
    kernels = kernels_item(context, pin)
    return kernels, plugin_item(context, pin, kernels)


def _pack(context: Context, trees: Mapping[str, Tree]) -> Item[PackResult] | None:
    if not context.pack:
        return None
    from sparkforge.build.packs import modules  # not needed by targets without a GPU
    from sparkforge.build.packs.modules import UPSTREAM
    from sparkforge.build.stages.packs import packs_item

    chosen = modules.pinned(context.pack, f"targets.{context.target_name}.pack")
    return packs_item(context, trees.get(UPSTREAM), chosen)


def _builder(context: Context) -> Item[BuilderResult] | None:
    if context.wheels != "compile":
        return None
    from sparkforge.build.compile.inputs import builder_item  # not needed by overlays

    return builder_item(context)


def tree_of(context: Context, name: str) -> Tree:
    """Return an upstream's source and series; raises what ``graph_of`` does."""
    patches, upstream = context.series_of(name), context.upstream(name)
    series.check_emptied(patches, upstream)
    source = source_item(context, name, upstream)
    if not patches.patches:
        return Tree(name, source, None)
    return Tree(name, source, series_item(context, name, upstream, patches, source))


def _product(
    context: Context, parts: image.Parts
) -> tuple[Item[Product], Item[EnvironmentResult] | None]:
    """Return the product, and an environment of the release if the smoke test compares one."""
    if context.engine is not None and context.base is not None:
        return image.image_item(context, context.engine, context.base, parts), None
    product = environment_item(context, parts.own, parts.house, "environment")
    # with arguments of the user's there is no proof: it is about the target as it is
    return product, None if context.arguments else _unpatched(context, parts.house)


def _unpatched(context: Context, house: Item[WheelhouseResult]) -> Item[EnvironmentResult]:
    wheels = [overlay_item(context, name, None) for name in context.target.wheels]
    return environment_item(context, wheels, house, f"environment ({UNPATCHED})", release=True)


def unpatched_environment(context: Context) -> Item[EnvironmentResult]:
    """Return the release without our series, in a virtual environment."""
    return _unpatched(context, wheelhouse_item(context))


def note_of(context: Context, base: BaseImage) -> ImageNote:
    """Return the inputs of a target's image and its parts, as the image holds them."""
    context = replace(context, base=base)
    graph = graph_of(context)
    parts = image.Parts(graph.wheels, graph.plugin, graph.pack, graph.wheelhouse, trial_item())
    return image.note_of(context, parts, base)
