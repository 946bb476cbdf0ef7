"""An upstream's pinned tree, its patched one, and the overlay wheel of that.

Trees are commits in the store's repository. Compiled wheels share some functions.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import UNPATCHED, Context
from sparkforge.build.results import OwnWheel, SeriesResult, SourceResult, WheelResult
from sparkforge.core import git
from sparkforge.core.disk import intact, sha256_file
from sparkforge.core.log import counted, log
from sparkforge.pins.pins import ReleaseFile, SourcePlan
from sparkforge.pins.types import member_of
from sparkforge.series import series
from sparkforge.series.series import Patched, Series
from sparkforge.sources import sources
from sparkforge.sources.download import Fetches
from sparkforge.sources.sources import Source
from sparkforge.store.store import Artefact, code_of

if TYPE_CHECKING:
    from sparkforge.wheels.overlay import Layer, Overlaid, Request


def to_fetch(context: Context, file: ReleaseFile) -> Fetches:
    """Return the download of a release file, unless the store has it."""
    there = context.store.download_path(file.sha256, file.file).exists()
    return Fetches({} if there else {file.sha256: file.size})


def chosen(context: Context, name: str) -> SourcePlan:
    """Return the provider of an upstream's source: the build's, or git for a mirror."""
    return "git" if name in context.access.mirrors else context.source


def source_item(context: Context, name: str) -> Cached[SourceResult]:
    """Return the source of an upstream."""
    upstream, repo = context.upstream(name), context.store.git_path(name)
    file = upstream.files[upstream.source_file] if upstream.source_file else None
    inputs = {
        "commit": upstream.commit_or_unknown,
        "tag": upstream.tag,
        "provider": chosen(context, name),
        "release_file": file.sha256 if file else None,
        "paths": [rule.model_dump() for rule in upstream.paths],
    }

    def make(folder: Path) -> SourceResult:
        source = sources.ensure(context.store, name, upstream, context.source, context.access)
        return SourceResult(source.provider, source.commit, source.tree, source.origin)

    def stands(artefact: Artefact[SourceResult]) -> bool:
        return git.has_commit(repo, artefact.result.commit)

    def fetches() -> Fetches:
        if file is not None and inputs["provider"] == "release":
            return to_fetch(context, file)
        there = upstream.commit is not None and git.has_commit(repo, upstream.commit)
        return Fetches(unknown=() if there else (f"{name} by git",))

    what = ("sources", f"source {name}", inputs, SourceResult, make)
    return Cached(*what, valid=stands, fetches=fetches, raw=True)


def series_item(context: Context, name: str, source: Cached[SourceResult]) -> Cached[SeriesResult]:
    """Return the patched tree of an upstream."""
    upstream, patches = context.upstream(name), context.series_of(name)
    inputs = {
        "source": dict(source.inputs),
        "series": patches.sha256,
        "patches": {patch.name: patch.sha256 for patch in patches.patches},
        "recorded": {kind: record.tree for kind, record in upstream.patched.items()},
    }

    def make(folder: Path) -> SeriesResult:
        before = Tree(name, source, None).before(context)
        patched = series.apply_recorded(context.store, patches, before, upstream)
        known = before.provider in upstream.patched
        note = "as recorded" if known else f"from {before.provider}, not recorded in pins.yaml"
        log.info(f"{name}: patches: {len(patches.patches)}, tree {patched.tree[:12]} ({note})")
        return SeriesResult(before.commit, patched.commit, patched.tree, dict(patched.touched))

    def stands(artefact: Artefact[SeriesResult]) -> bool:
        # the source may have been fetched anew, this time from git and not from the release file
        now = source.find(context.store)
        same = now is None or now.result.commit == artefact.result.source
        repo = context.store.git_path(name)
        return same and git.has_commit(repo, artefact.result.commit)

    what = ("series", f"series {name}", inputs, SeriesResult, make, (source,))
    return Cached(*what, valid=stands, raw=True)


@dataclass(frozen=True)
class Tree:
    """An upstream's source, and its series where that has patches."""

    upstream: str
    source: Cached[SourceResult]
    series: Cached[SeriesResult] | None

    @property
    def items(self) -> tuple[Cached[Any], ...]:
        """What makes the tree."""
        return (self.source,) if self.series is None else (self.source, self.series)

    def before(self, context: Context) -> Source:
        """Return the source without patches."""
        made, repo = self.source.result, context.store.git_path(self.upstream)
        return Source(self.upstream, made.provider, repo, made.commit, made.tree, made.origin)

    def layer(self, context: Context) -> Layer:
        """Return the patched tree, and the places of its files in a wheel."""
        from sparkforge.wheels.overlay import Layer

        source = self.before(context)
        patched = Patched(source, source.commit, source.tree)
        if self.series is not None:
            made = self.series.result
            patched = Patched(source, made.commit, made.tree, made.touched)
        return Layer(patched, context.pins.upstream(self.upstream).paths)


def tree_of(context: Context, name: str) -> Tree:
    """Return an upstream's source and series."""
    series.check_emptied(context.series_of(name), context.upstream(name))
    source = source_item(context, name)
    patched = bool(context.series_of(name).patches)
    return Tree(name, source, series_item(context, name, source) if patched else None)


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
        "paths": {
            layer: [rule.model_dump() for rule in context.pins.upstream(layer).paths]
            for layer in layers
        },
        "version_file": upstream.version_file,
        "epoch": context.epoch,
    }
    if file.natives is not None:  # the Python files are those of the source
        sdist = upstream.files[upstream.source_file].sha256 if upstream.source_file else None
        inputs["release"] = [upstream.version, sdist]
    return inputs


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
        "paths": [rule.model_dump() for rule in upstream.paths],
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


def release_files(context: Context, name: str, members: Collection[str]) -> dict[str, bytes]:
    """Return files of a release wheel, by their path in it; with natives, Python files."""
    upstream = context.upstream(name)
    sdist = upstream.files.get(upstream.source_file or "")
    if not context.release_file(name).natives or not sdist or chosen(context, name) != "release":
        with zipfile.ZipFile(release_wheel(context, name)) as wheel:
            return {member: wheel.read(member) for member in members}
    # the wheel would be made of these first: 10 s where a remote store had all that is built
    files = sources.sdist_files(sources.fetch_release_file(context.store, sdist, context.access))
    places = ((member_of(upstream.paths, file.path), file.data) for file in files)
    found = {member: data for member, data in places if member in members}
    return {member: found[member] for member in members}


def request_of(context: Context, name: str, wheel: Path, local: str) -> Request:
    """Return the changes to a release wheel other than its files."""
    from sparkforge.wheels.overlay import Request

    plan, version_file = context.target.wheels[name], context.pins.upstream(name).version_file
    names = (wheel, plan.name, local)
    return Request(*names, plan.drop_requires, version_file, context.epoch)


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

    Without trees it is the release without our series, for measurements, work trees and
    tests. ``note``: why it is not compiled, if that was requested.
    """
    plan, upstream = context.target.wheels[name], context.pins.upstream(name)
    file = context.release_file(name)
    layers = {} if trees is None else series_of(context, name)
    ours = () if trees is None else tuple(trees[layer] for layer in layers)
    inputs = common_inputs(context, name, layers)
    label, stage = f"wheel {name}", "wheels"
    if trees is None:
        inputs["local"] = f"{plan.local.split('.')[0]}.{UNPATCHED}"
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
