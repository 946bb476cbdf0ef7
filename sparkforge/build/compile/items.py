"""Compiled wheels: pins and options → items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.compile import builder, externals, natives
from sparkforge.build.compile.builderitem import engine_of
from sparkforge.build.compile.externalitem import external_item
from sparkforge.build.compile.natives import Decision
from sparkforge.build.compile.recipe import Recipe, arch_list, shown
from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results, holds_wheel
from sparkforge.build.jobs import CXX_GIB, KEEP_GIB, NVCC_GIB, width
from sparkforge.build.results import BuilderResult, CompiledWheelResult, ExternalResult
from sparkforge.build.stages.source import chosen
from sparkforge.build.stages.wheels import (
    Tree,
    common_inputs,
    release_wheel,
    request_of,
    seal,
    series_of,
)
from sparkforge.core.hashing import key_of
from sparkforge.core.log import log
from sparkforge.pins.pins import ReleaseFile
from sparkforge.sources import sources
from sparkforge.store.codekey import code_of

if TYPE_CHECKING:
    from sparkforge.build.compile.running import Sources


def external_items(context: Context, name: str) -> dict[str, Item[ExternalResult]]:
    """Return the external sources that this compile needs, by name."""
    upstream = context.pins.upstream(name)
    if upstream.compile.blocked or not _decision(context, name).fetches:
        return {}
    return {external: external_item(context, name, external) for external in upstream.externals}


def _decision(context: Context, name: str) -> Decision:
    patches = context.series_of(name).patches
    touched = {entry.path: patch.name for patch in patches for entry in patch.entries}
    named = {target: patch.name for patch in patches for target in patch.natives}
    device = "cuda" if context.target.cuda_arch is not None else "cpu"
    return natives.decide(name, context.pins.upstream(name), touched, context.native, device, named)


def _redirects(context: Context, name: str) -> dict[str, str]:
    """Return the variables that point a build at its externals, and at carried upstreams."""
    found = {pin.redirect: key for key, pin in context.pins.upstream(name).externals.items()}
    for layer in context.target.wheels[name].carries:
        if redirect := context.pins.upstream(layer).compile.redirect:
            found[redirect] = layer
    return found


def compile_item(
    context: Context,
    name: str,
    image: Item[BuilderResult],
    trees: Mapping[str, Tree],
    fetched: Iterable[Item[ExternalResult]],
) -> Item[CompiledWheelResult]:
    """Return the compiled wheel of an upstream.

    Args:
        trees: of the upstream and of those that its wheel carries, by name.
        fetched: external sources of the build.

    Raises:
        CompileError: the series changes what can't be compiled.
    """
    plan, upstream = context.target.wheels[name], context.pins.upstream(name)
    file = upstream.files[plan.files[context.platform]]
    layers = series_of(context, name)
    decision = _decision(context, name)
    device = arch_list(context.target.cuda_arch)
    # a build without natives compiles nothing, whatever the target's architecture
    compiles = decision.everything or bool(decision.compiled)
    recipe = Recipe(
        upstream=upstream,
        decision=decision,
        arch=device if compiles else None,
        epoch=context.epoch,
        redirects=_redirects(context, name),
        jobs=width(context.jobs, NVCC_GIB if device and compiles else CXX_GIB, KEEP_GIB),
    )
    fixed = replace(recipe, jobs=0)
    inputs = {
        **common_inputs(context, name, layers),
        "native": context.native,
        # an overlay takes the patched files from them, a compile takes all files
        "sources": {layer: chosen(context, layer) for layer in context.layers(name)},
        "builder": image.key,
        "environment": fixed.environment(),
        "steps": [step.words for step in fixed.steps()],
        "externals": {key: pin.commit for key, pin in upstream.externals.items()}
        if decision.fetches
        else {},
        "code": code_of(__name__),
    }
    work = f"{name}-{key_of(inputs)[:16]}"
    tag = builder.tag(context.target_name, image.key)
    wheel = _Compile(context, name, file, recipe, trees, inputs["local"], tag, work)
    uid, gid = builder.user()
    commands = shown(
        recipe,
        tag,
        context.store.root / "compile" / work,
        context.store.root / "ccache",
        f"{uid}:{gid}",
    )
    return Item(
        "wheels",
        f"wheel {name}",
        inputs,
        CompiledWheelResult,
        wheel.make,
        needs=(
            *(item for tree in trees.values() for item in tree.items),
            *fetched,
            image,
        ),
        valid=holds_wheel,
        download=(file,),
        commands=tuple(commands),
    )


@dataclass(frozen=True)
class _Compile:
    """The inputs of a compiled wheel."""

    context: Context
    name: str
    """The upstream."""
    release: ReleaseFile
    recipe: Recipe
    trees: Mapping[str, Tree]
    local: str
    """Local version, after the +."""
    tag: str
    """Of the builder image."""
    work: str
    """Name of its folder in the store."""

    def make(self, folder: Path, results: Results) -> CompiledWheelResult:
        """Compile the patched tree, and write the wheel."""
        from sparkforge.build.compile import assembling, running

        context, name, recipe, trees = self.context, self.name, self.recipe, self.trees
        decision = recipe.decision
        engine = engine_of(context)
        wheel = release_wheel(context, name, self.release)
        own = trees[name].layer(context, results).patched
        place = running.Place(
            engine,
            self.tag,
            context.store.cache_path("compile") / self.work,
            context.store.cache_path("ccache"),
        )
        what = ", ".join(native.file for native in decision.compiled) or (
            "all native files" if decision.everything else "no native file"
        )
        log.info(f"{name}: the patched tree {own.tree[:12]}, and {what}; {recipe.jobs} at once")
        made = running.run(recipe, _sources(context, name, trees, results, decision), place)
        # with everything compiled, carried upstreams were read by the build itself
        layers = [] if decision.everything else series_of(context, name)
        carried = [trees[layer].layer(context, results) for layer in layers if layer != name]
        request = request_of(context, name, wheel, self.local)
        done = assembling.assemble(request, recipe, made, own, carried, folder)
        running.finished(place)
        released = sum(native.origin == "release" for native in done.natives.values())
        log.info(
            f"native files: {len(done.natives) - released} compiled, {released} from the release"
        )
        result = seal(done.wheel)
        return CompiledWheelResult(**vars(result), natives=done.natives, differs=done.differs)


def _sources(
    context: Context, name: str, trees: Mapping[str, Tree], results: Results, decision: Decision
) -> Sources:
    """Return the sources to unpack for the compile."""
    from sparkforge.build.compile.running import Sources

    upstream = context.pins.upstream(name)
    own = trees[name].layer(context, results).patched
    supplement: tuple[tuple[str, str], ...] = ()
    if own.source.provider == "git" and upstream.compile.supplement:
        whole = sources.release(context.store, name, upstream, context.access)
        supplement = tuple((whole.commit, path) for path in upstream.compile.supplement)
    if not decision.fetches:
        return Sources(own.source.repo, own.commit, supplement)
    fetched = {
        key: externals.ensure(context.store, f"{name}/{key}", pin, context.access)
        for key, pin in upstream.externals.items()
    }
    carried = {}
    for layer in context.target.wheels[name].carries:
        pin_of = context.pins.upstream(layer)
        if pin_of.compile.redirect is not None:
            tree = trees[layer].layer(context, results).patched
            folder = pin_of.paths[0].repo.rstrip("/")
            carried[layer] = (tree.source.repo, f"{tree.commit}:{folder}")
    return Sources(own.source.repo, own.commit, supplement, fetched, carried)
