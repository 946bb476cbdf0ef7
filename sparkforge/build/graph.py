"""What a target consists of: pins and options → items, in order.

Every item's inputs are known before anything runs, because pins.yaml and the patch files say
what the earlier stages will give. So a plan, ``explain`` and a build in which nothing changed
cost only hashing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparkforge.build.context import STAGES, UNPATCHED, Context, Item
from sparkforge.build.stages import image
from sparkforge.build.stages.environment import environment_item
from sparkforge.build.stages.patched import series_item
from sparkforge.build.stages.smoke import smoke_item
from sparkforge.build.stages.source import source_item
from sparkforge.build.stages.trial import trial_item
from sparkforge.build.stages.wheelhouse import wheelhouse_item
from sparkforge.build.stages.wheels import overlay_item
from sparkforge.runtime.engine import BaseImage
from sparkforge.series import series


def items(context: Context, until: str) -> list[Item]:
    """Return what a build consists of, in order, up to and with the stage ``until``."""
    result: list[Item] = []
    wheels: list[Item] = []
    compiles = context.wheels == "compile"
    if compiles:
        from sparkforge.build.compile import items as compiling  # not needed by overlays
        from sparkforge.build.compile.builderitem import builder_items

        result += builder_items(context, wheels)
    for name in context.target.wheels:
        for layer in context.layers(name):
            patches = context.series_of(layer)
            upstream = context.upstream(layer)
            series.check_emptied(patches, upstream)
            if patches.patches or compiles:
                source = source_item(context, layer, upstream)
                result.append(source)
                if patches.patches:
                    result.append(series_item(context, layer, upstream, patches, source))
        if compiles:
            result += compiling.external_items(context, name)
        wheels.append(_wheel_item(context, name))
    result += wheels
    house = wheelhouse_item(context)
    result.append(house)
    if context.engine is not None:
        result.append(trial_item())
        baked = image.image_item(context, wheels, house)
        extra: list[Item] = []
    else:
        baked = environment_item(context, wheels, house, "environment")
        extra = _unpatched_items(context, house)
    result.append(baked)
    if context.target.smoke is not None:
        if context.arguments:  # the proof is about the target as it is
            extra = []
        result += [*extra, smoke_item(context, baked, extra)]
    last = STAGES.index(until)
    # the sort keeps the order within a stage; sources of all upstreams come first
    ordered = sorted(result, key=lambda item: STAGES.index(item.stage))
    return [item for item in ordered if STAGES.index(item.stage) <= last]


# -- wheels ------------------------------------------------------------------------------


def _wheel_item(context: Context, name: str) -> Item:
    """Return the patched wheel of an upstream, compiled or overlaid as the context asks."""
    if context.wheels != "compile":
        return overlay_item(context, name, patched=True)
    from sparkforge.build.compile import items as compiling  # not needed by overlays

    if (reason := context.pins.upstream(name).compile.blocked) is None or context.native == "all":
        return compiling.compile_item(context, name)
    return overlay_item(context, name, patched=True, note=reason)


# -- environment and image -----------------------------------------------------------


def _unpatched_items(context: Context, house: Item) -> list[Item]:
    """The release without our series, for the proof that it fails."""
    wheels = [overlay_item(context, name, patched=False) for name in context.target.wheels]
    label = f"environment ({UNPATCHED})"
    return [*wheels, environment_item(context, wheels, house, label, release=True)]


def release_items(context: Context) -> list[Item]:
    """What the release without our series consists of, as a plain environment; it comes last."""
    house = wheelhouse_item(context)
    return [house, *_unpatched_items(context, house)]


def made_of(context: Context, base: BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of an image's parts and of the image itself, by label, as it holds them."""
    context = replace(context, base=base)
    wheels = [_wheel_item(context, name) for name in context.target.wheels]
    return image.parts(context, wheels, wheelhouse_item(context), base)
