"""Compiled wheels: an overlay, with the native files that the series changes compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import WHEELS, Context, Tools, width
from sparkforge.build.results import CompiledWheelResult, FilesResult, WheelResult, all_intact
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.build.stages.wheels import (
    Tree,
    chosen,
    common_inputs,
    holds_wheel,
    overlay_item,
    release_wheel,
    request_of,
    seal,
    series_of,
    to_fetch,
)
from sparkforge.core import git, pages
from sparkforge.core.disk import code_digest, sha256_file
from sparkforge.core.errors import BuildError, CommandError, FetchError, MachineError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import Native, PathRule, rule_of
from sparkforge.runtime.engine import BaseImage, build_image
from sparkforge.series.series import Series
from sparkforge.sources.download import Fetches
from sparkforge.wheels import archive, overlay
from sparkforge.wheels.overlay import Layer, Overlaid, Request

_Trees = Mapping[str, Tree]
_Fetched = dict[str, Cached[FilesResult]]
ARCHIVE = "source.tar"
# CMake and ninja are locked wheels. patch: vLLM's CMake patches one header of torch with it.
# libnuma-dev: its CPU kernels
_PACKAGES = ("ccache", "g++", "gcc", "git", "libc6-dev", "libnuma-dev", "patch")


def changed(name: str, upstream: Upstream, patches: Series, device: str) -> tuple[Native, ...]:
    """Return the native files that a series changes, for ``cuda`` or ``cpu``.

    BuildError: a patch changes what no rule of pins.yaml names, or what can't be compiled.
    """
    natives = upstream.compile.natives
    found: dict[str, Native] = {}
    for patch in patches.patches:
        paths = [entry.path for entry in patch.entries]
        unknown = set(patch.natives) - {native.target for native in natives}
        for path in paths:
            placed = rule_of(upstream.paths, path) is not None
            if not placed and not any(native.made_from(path) for native in natives):
                unknown.add(path)
        if unknown:
            msg = f"{patch.name}: pins.yaml does not say what {', '.join(sorted(unknown))} is for"
            raise BuildError(msg, f"add it to upstreams.{name}.compile.natives or to paths")
        for native in natives:
            touched = native.target in patch.natives or any(map(native.made_from, paths))
            if touched and native.device in ("empty", device):
                if native.blocked:
                    msg = f"{patch.name} changes {native.file}: {native.blocked}"
                    raise BuildError(msg, "leave out that patch, or pin what the compile needs")
                found[native.file] = native
    return tuple(found[file] for file in sorted(found))


def script(
    upstream: Upstream,
    natives: Sequence[Native],
    arch: str | None,
    epoch: int,
    redirects: Mapping[str, str],
) -> str:
    """Return the shell script of the Dockerfile's stage ``compile``, which has no network.

    ``arch``: TORCH_CUDA_ARCH_LIST; None: no GPU. ``redirects``: variables that point at sources
    which CMake would fetch, with the folder below ``externals``.
    """
    devices: dict[str, list[str]] = {}
    for native in natives:
        devices.setdefault(native.device, []).append(native.target)
    what = {"compile": upstream.compile, "devices": devices, "redirects": redirects}
    template = Path(__file__).with_name("compile.sh.j2")
    return pages.render(template, **what, arch=arch, epoch=epoch)


def external_item(context: Context, upstream: str, external: str) -> Cached[FilesResult]:
    """Return a repository that an upstream's CMake would fetch, with submodules, as an archive.

    It is fetched by its full SHA. A commit's tree has the SHAs of its submodules, so it pins them.
    """
    pin = context.pins.upstream(upstream).externals[external]
    name = f"{upstream}/{external}"

    def make(folder: Path) -> FilesResult:
        url = context.access.mirrors.get(name, pin.git)
        local = "://" not in url
        remedy = f"check the network, or give --mirror {name}=URL or PATH of a clone"
        if context.access.offline and not local:
            msg = f"{name}: commit {pin.commit[:12]} is not in the store, and --offline is set"
            raise FetchError(msg, remedy)
        url = str(Path(url).resolve()) if local else url
        log.info(f"{name}: fetching {pin.commit[:12]} from {url}")
        # whether submodules may be folders of this machine
        files = f"protocol.file.allow={'always' if local else 'never'}"
        with context.store.temporary("external") as work:
            program = ("git", "-C", work, "-c", files, "-c", "core.hooksPath=/dev/null")
            try:
                for words in (
                    ("init", "--quiet", "--template="),
                    ("remote", "add", "origin", url),  # addresses of submodules may be relative
                    ("fetch", "--quiet", "--depth=1", "--no-tags", "origin", pin.commit),
                    ("checkout", "--quiet", "FETCH_HEAD"),
                    ("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1"),
                ):
                    call(*program, *words, env={"GIT_TERMINAL_PROMPT": "0"}, stream=True)
            except CommandError as error:
                raise FetchError(f"{name}: {error}", remedy) from error
            out = folder / ARCHIVE
            call("tar", "--create", "--exclude=.git", "--file", out, "--directory", work, ".")
        return FilesResult({ARCHIVE: sha256_file(out)})

    return Cached(
        *("sources", f"external {name}", {"commit": pin.commit}, FilesResult, make),
        valid=all_intact,
        fetches=lambda: Fetches(unknown=(f"{name} by git",)),
    )


def compiled(context: Context, tools: Tools, trees: _Trees) -> dict[str, Cached[WheelResult]]:
    """Return a target's wheels: compiled where a series changes native files, else overlays.

    BuildError: as ``changed``; the target names no requirements of a compile. MachineError: the
    target has no base image, and none is named.
    """
    if tools.base is None:
        msg = f"target {context.target_name} has no base image in pins.yaml to compile in"
        raise MachineError(msg, "give one: --base IMAGE (with Python and apt)")
    if context.platform not in context.target.builder:
        msg = f"targets.{context.target_name}: has no builder for {context.platform}"
        raise BuildError(msg, "add a lock of its upstreams' build requirements (builder:)")
    device = "cpu" if context.target.cuda_arch is None else "cuda"
    found: dict[str, Cached[WheelResult]] = {}
    for name in context.target.wheels:
        upstream = context.pins.upstream(name)
        natives: tuple[Native, ...] = ()
        if not upstream.compile.blocked:
            natives = changed(name, upstream, context.series_of(name), device)
        if natives:
            ours = {layer: trees[layer] for layer in context.layers(name)}
            found[name] = _compile_item(context, tools, tools.base, name, ours, natives)
        else:
            note = upstream.compile.blocked or "its series changes no native file"
            found[name] = overlay_item(context, name, trees, note)
    return found


def _compile_item(
    context: Context,
    tools: Tools,
    base: BaseImage,
    name: str,
    trees: _Trees,
    natives: tuple[Native, ...],
) -> Cached[WheelResult]:
    upstream, target, apt = context.pins.upstream(name), context.target, context.apt(base.digest)
    file = upstream.files[target.wheels[name].files[context.platform]]
    fetched: _Fetched = {}
    redirects: dict[str, str] = {}
    # CMake's configuration for a device reads them
    if any(native.device != "empty" for native in natives):
        fetched = {key: external_item(context, name, key) for key in upstream.externals}
        redirects = {pin.redirect: key for key, pin in upstream.externals.items()}
        for layer in target.wheels[name].carries:
            if redirect := context.pins.upstream(layer).compile.redirect:
                redirects[redirect] = layer
    # of the family: kernels for plain 12.1 (and 12.0) that use block-scaled MMA compile without a
    # warning and hold a trap; ``a`` of 12.0 does not load on 12.1
    arch = None if target.cuda_arch is None else f"{target.cuda_arch}f"
    text = script(upstream, natives, arch, context.epoch, redirects)
    lock = context.root / target.builder[context.platform]
    house = wheelhouse_item(context, lock, "builder's wheelhouse", "wheels")
    dockerfile = context.root / "Dockerfile"
    arguments = {
        "PYTHON_VERSION": target.python,
        "SOURCE_DATE_EPOCH": str(context.epoch),
        "SYSTEM_PACKAGES": " ".join((*_PACKAGES, f"python{target.python}-dev")),
    }
    inputs = {
        **common_inputs(context, name, series_of(context, name)),
        # an overlay takes the patched files from them, a compile takes all files
        "sources": {layer: chosen(context, layer) for layer in trees},
        "builder": {
            "base": base.digest,
            "apt": apt and apt.model_dump(mode="json"),
            "wheelhouse": house.key,
            "arguments": arguments,
            "recipe": code_digest(dockerfile),
        },
        "script": text,
        "externals": {key: item.key for key, item in fetched.items()},
    }

    def make(folder: Path) -> CompiledWheelResult:
        wheel = release_wheel(context, name)
        log.info(f"{name}: {', '.join(native.file for native in natives)}")
        # of one g++; of nvcc the largest file measured, one of vLLM's (docs/build.md)
        jobs = tools.jobs or width(2.0 if target.cuda_arch is None else 8.9)
        # one a store: the second build of `verify`, in an empty store, compiles everything again
        namespace = sha256(str(context.store.root).encode()).hexdigest()[:16]
        here = f"export CMAKE_BUILD_PARALLEL_LEVEL={jobs} CCACHE_NAMESPACE={namespace}\n"
        with context.store.temporary("compile") as work:
            sources, wheels, out = work / "sources", work / "wheels", work / "out"
            _fill(context, name, trees, fetched, sources)
            (sources / "compile.sh").write_text(here + text)
            wheels.mkdir()
            (wheels / "requirements.txt").write_bytes(lock.read_bytes())
            (wheels / "sources.list").write_bytes(context.apt_sources(base.digest))
            assert tools.engine is not None  # build_of refuses a compile without one
            build_image(
                *(dockerfile, context.root, tools.engine.context),
                # quoted: a comma in the path would begin another field
                ("--output", f'type=local,"dest={out}"'),
                stage="compiled",
                platform=context.platform,
                arguments={"BASE": base.reference, **arguments},
                contexts={"sources": sources, "wheels": wheels, "wheelhouse": house.path / WHEELS},
                options=("--no-cache-filter=compile",),  # the store keeps what is compiled
                ca_bundle=tools.ca_bundle,
            )
            made = {native.file: (out / native.file).read_bytes() for native in natives}
        ours = [trees[layer].layer(context) for layer in series_of(context, name)]
        done = overlaid(request_of(context, name, wheel, inputs["local"]), ours, made, folder)
        hashes = {path: sha256(data).hexdigest() for path, data in made.items()}
        return CompiledWheelResult(**vars(seal(done)), natives=hashes)

    return Cached(
        *("wheels", f"wheel {name}", inputs, CompiledWheelResult, make),
        needs=(*(item for tree in trees.values() for item in tree.items), *fetched.values(), house),
        valid=holds_wheel,
        fetches=lambda: to_fetch(context, file),
    )


def _fill(context: Context, name: str, trees: _Trees, fetched: _Fetched, folder: Path) -> None:
    """Write the patched trees and the externals as the Dockerfile reads them."""
    for empty in ("out", "cmake", "tmp"):  # the compiling user owns what is copied
        (folder / empty).mkdir(parents=True)
    for layer, tree in trees.items():
        pin, patched = context.pins.upstream(layer), tree.layer(context).patched
        if layer == name:
            git.unpack(patched.source.repo, patched.commit, [], folder / "tree")
        elif pin.compile.redirect is not None:
            where = f"{patched.commit}:{pin.paths[0].repo.rstrip('/')}"
            git.unpack(patched.source.repo, where, [], folder / "externals" / layer)
    for key, item in fetched.items():
        out = folder / "externals" / key
        packed = undamaged(item.path / ARCHIVE, item.result.files[ARCHIVE])
        out.mkdir(parents=True)
        call("tar", "-x", "--no-same-owner", "--file", packed, "--directory", out)


def overlaid(
    request: Request, layers: Sequence[Layer], compiled: Mapping[str, bytes], folder: Path
) -> Overlaid:
    """Write the release wheel with patched and compiled files; BuildError as ``overlay.plan``.

    ``compiled``: native files by their path in the wheel. Their sources are in no wheel.
    """
    placed = []
    for layer in layers:  # what no rule of pins.yaml places are sources of native files
        unplaced = (path for path in layer.patched.touched if rule_of(layer.paths, path) is None)
        rules = (PathRule(repo=path, wheel=None, build=True) for path in unplaced)
        placed.append(replace(layer, paths=(*layer.paths, *rules)))
    with archive.opened(request.wheel) as release:
        changes = overlay.plan(request, placed, release)
        changes = replace(changes, fresh={**changes.fresh, **compiled}, compile_only=())
        return overlay.write(request, release, changes, folder)
