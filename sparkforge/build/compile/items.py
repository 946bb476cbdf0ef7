"""Compiled wheels: the patched tree's Python and changed native files, the release's others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sparkforge.build.compile import natives
from sparkforge.build.compile.builder import engine_of
from sparkforge.build.compile.externals import ARCHIVE, external_item
from sparkforge.build.compile.recipe import NATIVE, Recipe, arch_list
from sparkforge.build.context import Context
from sparkforge.build.item import Item, Results, holds_wheel, undamaged
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
from sparkforge.core import git
from sparkforge.core.errors import CommandError, CompileError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.compiling import Native
from sparkforge.pins.pins import ReleaseFile
from sparkforge.runtime import buildx
from sparkforge.sources import sources
from sparkforge.store.codekey import code_of


def external_items(context: Context, name: str) -> dict[str, Item[ExternalResult]]:
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
    name: str,
    image: Item[BuilderResult],
    trees: Mapping[str, Tree],
    fetched: Mapping[str, Item[ExternalResult]],
) -> Item[CompiledWheelResult]:
    """Return the compiled wheel of an upstream.

    Args:
        trees: of the upstream and of those that its wheel carries, by name.
        fetched: external sources of the build, by name.

    Raises:
        CompileError: the series changes what can't be compiled.
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
    wheel = _Compile(context, name, file, recipe, image, trees, fetched, inputs["local"])
    return Item(
        "wheels",
        f"wheel {name}",
        inputs,
        CompiledWheelResult,
        wheel.make,
        needs=(
            *(item for tree in trees.values() for item in tree.items),
            *fetched.values(),
            image,
        ),
        valid=holds_wheel,
        download=(file,),
        commands=tuple(wheel.script().splitlines()),
    )


@dataclass(frozen=True)
class _Compile:
    """The inputs of a compiled wheel."""

    context: Context
    name: str
    """The upstream."""
    release: ReleaseFile
    recipe: Recipe
    image: Item[BuilderResult]
    trees: Mapping[str, Tree]
    externals: Mapping[str, Item[ExternalResult]]
    local: str
    """Local version, after the +."""

    def script(self) -> str:
        """Return the script for this machine's memory and store."""
        gib = CXX_GIB if self.recipe.arch is None else NVCC_GIB
        jobs = width(self.context.jobs, gib, KEEP_GIB)
        # one a store: the second build of `verify`, in an empty store, compiles everything again
        store = sha256(str(self.context.store.root).encode()).hexdigest()[:16]
        return self.recipe.script(jobs, store)

    def make(self, folder: Path, results: Results) -> CompiledWheelResult:
        """Compile the patched tree, and write the wheel.

        Raises:
            CompileError: it does not compile, or the build lacks a file of the release.
        """
        from sparkforge.build.compile import assembling

        context, name = self.context, self.name
        engine = engine_of(context)
        builder = results.of(self.image).tag
        if not engine.has_image(builder):  # it must not be looked up in a public registry
            raise CompileError(f"the engine has no image {builder}", "add --force builder")
        wheel = release_wheel(context, name, self.release)
        own = self.trees[name].layer(context, results)
        what = ", ".join(native.file for native in self.recipe.natives) or "no native file"
        log.info(f"{name}: the patched tree {own.patched.tree[:12]}, and {what}")
        with context.store.temporary("compile") as work:
            self._unpack(results, work / "sources")
            (work / "out").mkdir()
            build = buildx.ImageBuild(
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
            try:
                call(*build.command(), stream=True, guarded=True)
            except CommandError as error:
                msg = f"{name} does not compile:\n{error}"
                raise CompileError(msg, "see the compiler's output above") from error
            carried = [
                self.trees[layer].layer(context, results)
                for layer in series_of(context, name)
                if layer != name
            ]
            request = request_of(context, name, wheel, self.local)
            made = assembling.built(work / "out", NATIVE, self.recipe.natives)
            done = assembling.assemble(request, made, own, carried, folder, self.recipe.upstream)
        released = sum(native.origin == "release" for native in done.natives.values())
        log.info(
            f"native files: {len(done.natives) - released} compiled, {released} from the release"
        )
        result = seal(done.wheel)
        return CompiledWheelResult(**vars(result), natives=done.natives, differs=done.differs)

    def _unpack(self, results: Results, folder: Path) -> None:
        """Write the sources and the script, as the Dockerfile's stage reads them."""
        context, upstream = self.context, self.recipe.upstream
        own = self.trees[self.name].layer(context, results).patched
        tree, outside = folder / "tree", folder / "externals"
        for name in ("out", "cmake", "tmp"):  # the compiling user owns what is copied
            (folder / name).mkdir(parents=True)
        git.unpack(own.source.repo, own.commit, [], tree)
        if own.source.provider == "git" and upstream.compile.supplement:
            whole = sources.release(context.store, self.name, upstream, context.access)
            git.unpack(own.source.repo, whole.commit, upstream.compile.supplement, tree)
        for name, item in self.externals.items():
            artefact = results.artefact(item)
            archive = artefact.path / ARCHIVE
            undamaged(archive, artefact.result.sha256, "fetches it again")
            (outside / name).mkdir(parents=True)
            call("tar", "-x", "--no-same-owner", "--file", archive, "--directory", outside / name)
        if self.externals:
            for layer in context.target.wheels[self.name].carries:
                pin = context.pins.upstream(layer)
                if pin.compile.redirect is not None:
                    patched = self.trees[layer].layer(context, results).patched
                    where = f"{patched.commit}:{pin.paths[0].repo.rstrip('/')}"
                    git.unpack(patched.source.repo, where, [], outside / layer)
        (folder / "compile.sh").write_text(self.script())
