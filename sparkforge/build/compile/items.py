"""Compiled wheels: the patched tree's Python and changed native files, the release's others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.compile import natives
from sparkforge.build.compile.builder import engine_of
from sparkforge.build.compile.externals import ARCHIVE, external_item
from sparkforge.build.compile.recipe import NATIVE, Recipe, arch_list
from sparkforge.build.context import Context, Tools
from sparkforge.build.jobs import CXX_GIB, KEEP_GIB, NVCC_GIB, width
from sparkforge.build.results import BuilderResult, CompiledWheelResult, ExternalResult
from sparkforge.build.stages.trees import Tree, chosen
from sparkforge.build.stages.wheels import (
    common_inputs,
    holds_wheel,
    release_wheel,
    request_of,
    seal,
    series_of,
)
from sparkforge.core import git
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.compiling import Native
from sparkforge.pins.pins import Upstream
from sparkforge.runtime.engine import Engine, build_image
from sparkforge.sources import sources
from sparkforge.store.store import code_of

if TYPE_CHECKING:
    from sparkforge.wheels.overlay import Layer


def external_items(context: Context, name: str) -> dict[str, Cached[ExternalResult]]:
    """Return the external sources that this compile needs, by name."""
    upstream = context.pins.upstream(name)
    if upstream.compile.blocked or not natives.reads_externals(_natives(context, name)):
        return {}
    return {external: external_item(context, name, external) for external in upstream.externals}


def _natives(context: Context, name: str) -> tuple[Native, ...]:
    patches = context.series_of(name).patches
    touched = {entry.path: patch.name for patch in patches for entry in patch.entries}
    named = {target: patch.name for patch in patches for target in patch.natives}
    device = "cuda" if context.target.cuda_arch is not None else "cpu"
    return natives.changed(name, context.pins.upstream(name), touched, device, named)


def _redirects(context: Context, name: str) -> dict[str, str]:
    """Return the variables that point a build at its externals, and at carried upstreams."""
    found = {pin.redirect: key for key, pin in context.pins.upstream(name).externals.items()}
    for layer in context.target.wheels[name].carries:
        if redirect := context.pins.upstream(layer).compile.redirect:
            found[redirect] = layer
    return found


def compile_item(
    context: Context,
    tools: Tools,
    name: str,
    image: Cached[BuilderResult],
    trees: Mapping[str, Tree],
    fetched: Mapping[str, Cached[ExternalResult]],
) -> Cached[CompiledWheelResult]:
    """Return the compiled wheel of an upstream.

    Args:
        trees: of the upstream and of those that its wheel carries, by name.
        fetched: external sources of the build, by name.

    Raises:
        BuildError: the series changes what can't be compiled.
    """
    plan, upstream = context.target.wheels[name], context.pins.upstream(name)
    file = upstream.files[plan.files[context.platform]]
    compiled = _natives(context, name)
    # a build without natives compiles nothing, whatever the target's architecture
    arch = arch_list(context.target.cuda_arch) if compiled else None
    recipe = Recipe(upstream, compiled, arch, context.epoch, _redirects(context, name))
    inputs = {
        **common_inputs(context, name, series_of(context, name)),
        # an overlay takes the patched files from them, a compile takes all files
        "sources": {layer: chosen(context, layer) for layer in context.layers(name)},
        "builder": image.key,
        "script": recipe.script(0, ""),
        "externals": {key: item.key for key, item in fetched.items()},
        "code": code_of(__name__),
    }
    gib = CXX_GIB if arch is None else NVCC_GIB
    # one a store: the second build of `verify`, in an empty store, compiles everything again
    namespace = sha256(str(context.store.root).encode()).hexdigest()[:16]
    script = recipe.script(width(tools.jobs, gib, KEEP_GIB), namespace)

    def make(folder: Path) -> CompiledWheelResult:
        from sparkforge.build.compile import assembling

        engine = engine_of(tools)
        builder = image.result.tag
        if not engine.has_image(builder):  # it must not be looked up in a public registry
            raise BuildError(f"the engine has no image {builder}", "add --force builder")
        wheel = release_wheel(context, name, file)
        layers = {layer: tree.layer(context) for layer, tree in trees.items()}
        what = ", ".join(native.file for native in compiled) or "no native file"
        log.info(f"{name}: the patched tree {layers[name].patched.tree[:12]}, and {what}")
        with context.store.temporary("compile") as work:
            (work / "out").mkdir()
            _unpack(context, recipe.upstream, layers, work / "sources")
            for key, item in fetched.items():
                _extract(item, work / "sources" / "externals" / key)
            (work / "sources" / "compile.sh").write_text(script)
            _run(context, engine, builder, name, work)
            made = assembling.built(work / "out", NATIVE, compiled)
            request = request_of(context, name, wheel, inputs["local"])
            carried = [layers[layer] for layer in series_of(context, name) if layer != name]
            done = assembling.assemble(request, made, layers[name], carried, folder, upstream)
        released = sum(native.origin == "release" for native in done.natives.values())
        log.info(
            f"native files: {len(done.natives) - released} compiled, {released} from the release"
        )
        result = seal(done.wheel)
        return CompiledWheelResult(**vars(result), natives=done.natives, differs=done.differs)

    return Cached(
        "wheels",
        f"wheel {name}",
        inputs,
        CompiledWheelResult,
        make,
        needs=(
            *(item for tree in trees.values() for item in tree.items),
            *fetched.values(),
            image,
        ),
        valid=holds_wheel,
        download=(file,),
        commands=tuple(script.splitlines()),
    )


def _unpack(
    context: Context, upstream: Upstream, layers: Mapping[str, Layer], folder: Path
) -> None:
    """Write the patched tree, and those of carried upstreams, as the Dockerfile reads them.

    Args:
        layers: of the upstream, which is the first, and of those that its wheel carries.
    """
    for name in ("out", "cmake", "tmp"):  # the compiling user owns what is copied
        (folder / name).mkdir(parents=True)
    (name, own), *carried = layers.items()
    source = own.patched.source
    git.unpack(source.repo, own.patched.commit, [], folder / "tree")
    if source.provider == "git" and upstream.compile.supplement:
        whole = sources.release(context.store, name, upstream, context.access)
        git.unpack(source.repo, whole.commit, upstream.compile.supplement, folder / "tree")
    for layer, tree in carried:
        pin = context.pins.upstream(layer)
        if pin.compile.redirect is not None:
            where = f"{tree.patched.commit}:{pin.paths[0].repo.rstrip('/')}"
            git.unpack(tree.patched.source.repo, where, [], folder / "externals" / layer)


def _extract(external: Cached[ExternalResult], folder: Path) -> None:
    archive = external.path / ARCHIVE
    undamaged(archive, external.result.sha256)
    folder.mkdir(parents=True)
    call("tar", "-x", "--no-same-owner", "--file", archive, "--directory", folder)


def _run(context: Context, engine: Engine, builder: str, name: str, work: Path) -> None:
    """Compile ``sources`` of a folder into its ``out``.

    Raises:
        BuildError: it does not compile.
    """
    log.info(f"compiling {name}")
    build_image(
        context.root / "Dockerfile",
        context.root,
        engine.context,
        # quoted: a comma in the path would begin another field
        ("--output", f'type=local,"dest={work / "out"}"'),
        stage="compiled",
        platform=context.platform,
        arguments={"BASE": builder},
        contexts={"sources": work / "sources"},
        options=("--no-cache-filter=compile",),  # the store keeps what is compiled
    )
