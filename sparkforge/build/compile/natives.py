"""Compiled wheels: an overlay, with the native files that the series changes compiled."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.compile.inputs import ARCHIVE, builder_item, external_item
from sparkforge.build.context import Context, Tools, width
from sparkforge.build.results import (
    BuilderResult,
    CompiledWheelResult,
    FilesResult,
    NativeFile,
    WheelResult,
)
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
from sparkforge.core import git
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import Native, PathRule, rule_of
from sparkforge.runtime.engine import build_image
from sparkforge.series.series import Series

if TYPE_CHECKING:
    from sparkforge.wheels.overlay import Layer, Request

BUILD = "/build"
"""Folder in the builder. The same on every machine: it stays in compiled files."""
_PYTHON = "/opt/sparkforge/venv/bin/python"
# Without these, nvcc puts temporary names and random symbols into its objects (measured)
NVCC_FLAGS = "-objtemp --frandom-seed=1"


def changed(name: str, upstream: Upstream, patches: Series, device: str) -> tuple[Native, ...]:
    """Return the native files that a series changes, for ``cuda`` or ``cpu``.

    Raises:
        BuildError: a patch changes what no rule of pins.yaml names, or what can't be compiled.
    """
    natives = upstream.compile.natives
    found: dict[str, Native] = {}
    for patch in patches.patches:
        paths = [entry.path for entry in patch.entries]
        for path in paths:
            placed = rule_of(upstream.paths, path) is not None
            if not placed and not any(native.made_from(path) for native in natives):
                msg = f"{patch.name} changes {path}, but pins.yaml does not say what it is for"
                raise BuildError(msg, f"add it to upstreams.{name}.compile.natives or to paths")
        if unknown := set(patch.natives) - {native.target for native in natives}:
            msg = f"{patch.name}: its trailer Native names {', '.join(unknown)}"
            raise BuildError(msg, f"add it to upstreams.{name}.compile.natives")
        for native in natives:
            touched = native.target in patch.natives or any(map(native.made_from, paths))
            if touched and native.device in ("empty", device):
                if native.blocked:
                    msg = f"{patch.name} changes {native.file}: {native.blocked}"
                    raise BuildError(msg, "leave out that patch, or pin what the compile needs")
                found[native.file] = native
    return tuple(found[file] for file in sorted(found))


def arch_list(cuda_arch: str | None) -> str | None:
    """Return TORCH_CUDA_ARCH_LIST for a target's architecture.

    From 10.0 on with the family's ``f``: kernels for plain 12.1 (and 12.0) that use block-scaled
    MMA compile without a warning and hold a trap; ``a`` of 12.0 does not load on 12.1.
    """
    if cuda_arch is None or int(cuda_arch.partition(".")[0]) < 10:
        return cuda_arch
    return f"{cuda_arch}f"


def script(
    upstream: Upstream,
    natives: Sequence[Native],
    arch: str | None,
    epoch: int,
    redirects: Mapping[str, str],
) -> str:
    """Return the shell script of the Dockerfile's stage ``compile``, which has no network.

    Args:
        arch: value of TORCH_CUDA_ARCH_LIST; None: no GPU.
        redirects: variables that point at sources which CMake would fetch, with the folder below
            ``externals``.
    """
    variables = {
        "SOURCE_DATE_EPOCH": str(epoch),
        **dict.fromkeys(("HOME", "TMPDIR"), f"{BUILD}/tmp"),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        **upstream.compile.variables,
        "CCACHE_DIR": f"{BUILD}/ccache",
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_MAXSIZE": "20G",
        **{name: f"{BUILD}/externals/{path}" for name, path in redirects.items()},
    }
    if arch is not None:
        variables |= {"TORCH_CUDA_ARCH_LIST": arch, "NVCC_APPEND_FLAGS": NVCC_FLAGS}
    lines = ["set -eux", "umask 022"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    for device in dict.fromkeys(native.device for native in natives):
        folder = f"{BUILD}/cmake/{device}"
        targets = [native.target for native in natives if native.device == device]
        configure = [
            *("cmake", "-S", f"{BUILD}/tree", "-B", folder, "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"),
            *(word.replace("{device}", device) for word in upstream.compile.configure),
            f"-DVLLM_PYTHON_EXECUTABLE={_PYTHON}",
            f"-DFETCHCONTENT_BASE_DIR={BUILD}/cmake/fetched",
        ]
        if device == "cuda":
            configure += [
                "-DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc",
                *("-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache", "-DNVCC_THREADS=1"),
            ]
        lines += [shlex.join(configure), f"cmake --build {folder} --target {shlex.join(targets)}"]
        install = f"cmake --install {folder} --strip --prefix {BUILD}/out --component"
        lines += [f"{install} {target}" for target in targets]
    return "\n".join([*lines, ""])


def compiled(
    context: Context, tools: Tools, trees: Mapping[str, Tree]
) -> dict[str, Cached[WheelResult]]:
    """Return a target's wheels: compiled where a series changes native files, else overlays.

    Raises:
        BuildError: as ``changed``, ``builder_item``.
        MachineError: as ``builder_item``.
    """
    image = builder_item(context, tools)
    device = "cpu" if context.target.cuda_arch is None else "cuda"
    found: dict[str, Cached[WheelResult]] = {}
    for name in context.target.wheels:
        upstream, layers = context.pins.upstream(name), context.layers(name)
        natives: tuple[Native, ...] = ()
        if not upstream.compile.blocked:
            natives = changed(name, upstream, context.series_of(name), device)
        if natives:
            ours = {layer: trees[layer] for layer in layers}
            found[name] = _compile_item(context, tools, name, image, ours, natives)
        else:
            note = upstream.compile.blocked or "its series changes no native file"
            found[name] = overlay_item(context, name, trees, note)
    return found


def _compile_item(
    context: Context,
    tools: Tools,
    name: str,
    image: Cached[BuilderResult],
    trees: Mapping[str, Tree],
    natives: tuple[Native, ...],
) -> Cached[WheelResult]:
    upstream, plan = context.pins.upstream(name), context.target.wheels[name]
    file = upstream.files[plan.files[context.platform]]
    fetched: dict[str, Cached[FilesResult]] = {}
    redirects: dict[str, str] = {}
    # CMake's configuration for a device reads them
    if any(native.device != "empty" for native in natives):
        fetched = {key: external_item(context, name, key) for key in upstream.externals}
        redirects = {pin.redirect: key for key, pin in upstream.externals.items()}
        for layer in plan.carries:
            if redirect := context.pins.upstream(layer).compile.redirect:
                redirects[redirect] = layer
    arch = arch_list(context.target.cuda_arch)
    text = script(upstream, natives, arch, context.epoch, redirects)
    inputs = {
        **common_inputs(context, name, series_of(context, name)),
        # an overlay takes the patched files from them, a compile takes all files
        "sources": {layer: chosen(context, layer) for layer in trees},
        "builder": image.key,
        "script": text,
        "externals": {key: item.key for key, item in fetched.items()},
    }

    def make(folder: Path) -> CompiledWheelResult:
        wheel = release_wheel(context, name)
        log.info(f"{name}: {', '.join(native.file for native in natives)}")
        # of one g++; of nvcc the largest file measured, one of vLLM's (docs/build.md)
        gib = 2.0 if context.target.cuda_arch is None else 8.9
        # one a store: the second build of `verify`, in an empty store, compiles everything again
        namespace = sha256(str(context.store.root).encode()).hexdigest()[:16]
        here = (
            f"export CMAKE_BUILD_PARALLEL_LEVEL={tools.jobs or width(gib)}\n"
            f"export CCACHE_NAMESPACE={namespace}\n"
        )
        with context.store.temporary("compile") as work:
            sources, out = work / "sources", work / "out"
            _fill(context, name, trees, fetched, sources)
            (sources / "compile.sh").write_text(here + text)
            assert tools.engine is not None  # build_of refuses a compile without one
            build_image(
                *(context.root / "Dockerfile", context.root, tools.engine.context),
                # quoted: a comma in the path would begin another field
                ("--output", f'type=local,"dest={out}"'),
                stage="compiled",
                platform=context.platform,
                arguments={"BASE": image.result.tag},
                contexts={"sources": sources},
                options=("--no-cache-filter=compile",),  # the store keeps what is compiled
            )
            made = {native.file: (out / native.file).read_bytes() for native in natives}
        ours = [trees[layer].layer(context) for layer in series_of(context, name)]
        return overlaid(request_of(context, name, wheel, inputs["local"]), ours, made, folder)

    return Cached(
        *("wheels", f"wheel {name}", inputs, CompiledWheelResult, make),
        needs=(*(item for tree in trees.values() for item in tree.items), *fetched.values(), image),
        valid=holds_wheel,
        fetches=lambda: to_fetch(context, file),
    )


def _fill(
    context: Context,
    name: str,
    trees: Mapping[str, Tree],
    fetched: Mapping[str, Cached[FilesResult]],
    folder: Path,
) -> None:
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
        archive = undamaged(item.path / ARCHIVE, item.result.files[ARCHIVE])
        out.mkdir(parents=True)
        call("tar", "-x", "--no-same-owner", "--file", archive, "--directory", out)


def overlaid(
    request: Request, layers: Sequence[Layer], compiled: Mapping[str, bytes], folder: Path
) -> CompiledWheelResult:
    """Write the release wheel with patched and compiled files; BuildError as ``overlay.plan``.

    Args:
        compiled: native files by their path in the wheel. Their sources are in no wheel.
    """
    from sparkforge.wheels import archive, overlay

    placed = []
    for layer in layers:  # what no rule of pins.yaml places are sources of native files
        unplaced = (path for path in layer.patched.touched if rule_of(layer.paths, path) is None)
        rules = (PathRule(repo=path, wheel=None, build=True) for path in unplaced)
        placed.append(replace(layer, paths=(*layer.paths, *rules)))
    natives = {
        file: NativeFile(sha256(data).hexdigest(), "compiled") for file, data in compiled.items()
    }
    with archive.opened(request.wheel) as release:
        changes = overlay.plan(request, placed, release)
        changes = replace(changes, fresh={**changes.fresh, **compiled}, compile_only=())
        made = overlay.write(request, release, changes, folder)
        for member in release.members.keys() - compiled.keys():
            if next(release.content(member), b"").startswith(b"\x7fELF"):
                digest = sha256(release.read(member)).hexdigest()
                natives[member] = NativeFile(digest, "release")
    return CompiledWheelResult(**vars(seal(made)), natives=dict(sorted(natives.items())))
