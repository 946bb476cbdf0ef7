"""Overlay wheels, and functions that compiled wheels share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import UNPATCHED, Context
from sparkforge.build.results import OwnWheel, WheelResult
from sparkforge.build.stages.trees import Tree, to_fetch
from sparkforge.core.disk import intact, sha256_file
from sparkforge.core.log import counted, log
from sparkforge.pins.pins import ReleaseFile, Upstream
from sparkforge.series.series import Patched, Series
from sparkforge.sources import sources
from sparkforge.store.store import Artefact, code_of

if TYPE_CHECKING:
    from sparkforge.wheels.overlay import Overlaid, Request


def holds_wheel(artefact: Artefact[OwnWheel]) -> bool:
    """Return whether the wheel that a result holds is still the one that was made."""
    return intact(artefact.path / artefact.result.file, artefact.result.sha256)


def hashed(wheels: Iterable[Cached[OwnWheel]]) -> dict[Path, str]:
    """Return the wheels that were made, each with its sha256; raises what ``undamaged`` does."""
    made = ((item.path / item.result.file, item.result.sha256) for item in wheels)
    return {undamaged(path, sha256): sha256 for path, sha256 in made}


def series_of(context: Context, name: str) -> dict[str, Series]:
    """Return the series that go onto a wheel, by upstream; empty ones are left out."""
    found = {layer: context.series_of(layer) for layer in context.layers(name)}
    return {layer: patches for layer, patches in found.items() if patches.patches}


def common_inputs(context: Context, name: str, layers: Mapping[str, Series]) -> dict[str, Any]:
    """Return the inputs that overlaid and compiled wheels have in common."""
    plan, upstream = context.target.wheels[name], context.pins.upstream(name)
    file = context.release_file(name)
    inputs: dict[str, Any] = {
        "release_wheel": file.model_dump(mode="json"),
        "upstream_commit": upstream.commit_or_unknown,
        "series": {layer: patches.sha256 for layer, patches in layers.items()},
        "wheel": plan.model_dump(mode="json", exclude={"files"}),
        "local": f"{plan.local}.{context.pins.release.counter}",
        "paths": {layer: _paths(context.pins.upstream(layer)) for layer in layers},
        "version_file": upstream.version_file,
        "epoch": context.epoch,
    }
    if file.natives is not None:  # the Python files are those of the source
        sdist = upstream.files[upstream.source_file].sha256 if upstream.source_file else None
        inputs["release"] = [upstream.version, sdist]
    return inputs


def _paths(upstream: Upstream) -> list[dict[str, Any]]:
    return [rule.model_dump() for rule in upstream.paths]


def release_wheel(context: Context, name: str, file: ReleaseFile | None = None) -> Path:
    """Return a release wheel, every byte of which was checked against its RECORD.

    Of an older release, it has the pinned source in place of its Python files.
    """
    from sparkforge.wheels import intake, overlay

    file = file or context.release_file(name)
    wheel = sources.fetch_release_file(context.store, file, context.access)
    intake.take(context.store, wheel, file.sha256)
    if file.natives is None:
        return wheel
    upstream, older = context.pins.upstream(name), file.natives
    source = sources.ensure(context.store, name, upstream, context.source, context.access)
    common: dict[str, Any] = {
        "release": upstream.version,
        "version_file": upstream.version_file,
        "epoch": context.epoch,
    }
    inputs = {
        "wheel": file.sha256,
        "natives": older.model_dump(mode="json"),
        "tree": source.tree,
        "paths": _paths(upstream),
        "code": code_of(__name__),
        **common,
    }

    def make(folder: Path) -> OwnWheel:
        local = f"natives.{older.release}"
        request = overlay.Request(wheel, None, local, (), add_requires=older.requires, **common)
        layer = overlay.Layer(Patched(source, source.commit, source.tree), upstream.paths)
        made = overlay.renew(request, layer, folder)
        log.info(f"{made.path.name}: native files of {wheel.name}")
        return OwnWheel(made.path.name, sha256_file(made.path), made.version)

    made = context.store.build("renewed", inputs, OwnWheel, make)
    return made.path / made.result.file


def request_of(context: Context, name: str, wheel: Path, local: str) -> Request:
    """Return the changes to a release wheel other than its files."""
    from sparkforge.wheels import overlay

    plan, version_file = context.target.wheels[name], context.pins.upstream(name).version_file
    given = (wheel, plan.name, local, plan.drop_requires, version_file, context.epoch)
    return overlay.Request(*given)


def seal(made: Overlaid) -> WheelResult:
    """Make a finished wheel read-only; return its entry in the receipt."""
    made.path.chmod(0o444)  # dist/ links to it: a change there must not change the store
    sha256 = sha256_file(made.path)
    counts = f"{counted(len(made.replaced), 'file')} replaced, {len(made.added)} added"
    log.info(f"{made.path.name}: {counts}, sha256 {sha256}")
    if made.compile_only:
        paths = ", ".join(made.compile_only)
        log.info(f"skipped (build rules only affect --wheels compile): {paths}")
    changes = (made.replaced, made.added, made.removed, made.left_out, made.compile_only)
    return WheelResult(made.path.name, sha256, made.version, *changes)


def overlay_item(
    context: Context, name: str, trees: Mapping[str, Tree] | None, note: str = ""
) -> Cached[WheelResult]:
    """Return an upstream's wheel with our files put in place.

    Args:
        trees: by upstream; None: the release without our series, for the proof that it fails.
        note: why it is not compiled, if that was requested.
    """
    plan, upstream = context.target.wheels[name], context.pins.upstream(name)
    file = context.release_file(name)
    layers = {} if trees is None else series_of(context, name)
    ours = () if trees is None else tuple(trees[layer] for layer in layers)
    inputs = common_inputs(context, name, layers)
    label, stage = f"wheel {name}", "wheels"
    if trees is None:
        inputs["local"] = f"{plan.local.split('.')[0]}.{UNPATCHED}"
        # only the smoke test needs it, and it is built just before that
        label, stage = f"wheel {name} ({UNPATCHED})", "smoke"

    def make(folder: Path) -> WheelResult:
        from sparkforge.wheels import overlay

        if note:
            log.info(f"{name} is overlaid, not compiled: {note}")
        wheel = release_wheel(context, name)
        if not layers and plan.name is None and not plan.drop_requires:
            log.info(f"{name}: no changes: the release wheel is used unmodified")
            os.link(wheel, folder / wheel.name)
            return WheelResult(wheel.name, file.sha256, upstream.version)
        request = request_of(context, name, wheel, inputs["local"])
        return seal(overlay.build(request, [tree.layer(context) for tree in ours], folder))

    return Cached(
        *(stage, label, inputs, WheelResult, make),
        needs=tuple(item for tree in ours for item in tree.items),
        valid=holds_wheel,
        fetches=lambda: to_fetch(context, file),
    )
