"""`build.py verify`: compare with a second, cold build byte by byte, and name the differences.

With an image's name: show its contents, and compare them with this checkout.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkforge.build import executor, receipt, setup
from sparkforge.build.context import Context
from sparkforge.build.executor import Build
from sparkforge.build.item import wheel_path
from sparkforge.build.options import (
    OutputOptions,
    ToolOptions,
    VariantOptions,
    as_last,
    platform_of,
)
from sparkforge.build.results import ImageArchiveResult, ImageResult
from sparkforge.core import plain
from sparkforge.core.command import Entry, argument, option
from sparkforge.core.errors import ImageError, UsageError, VerifyError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.log import log
from sparkforge.core.programs import have
from sparkforge.core.run import call
from sparkforge.inspect.verify import bytediff, cosign, signing
from sparkforge.inspect.verify.bytediff import Difference
from sparkforge.pins import pins
from sparkforge.pins.types import MACHINES, Platform
from sparkforge.sources.project import Project, ProjectOptions, pins_file

if TYPE_CHECKING:
    from sparkforge.runtime.registry import Reference

# files of the checkout that a build reads, beside the plugin's folder
_INPUTS = (
    "pins.yaml",
    "patches",
    "requirements",
    "scripts",
    "sparkforge",
    "Dockerfile",
    ".dockerignore",
)
_SHOWN = 20
_DIFFOSCOPE_LINES = 80


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``verify``."""

    image: str | None = argument(
        "check that this checkout builds this image: an archive, a receipt.json or a name"
        " that the engine knows; REGISTRY/NAME@sha256:…: pull it, with --key or --identity"
        " check its signature and what is attached; with these also a folder of published files"
        " (default: rebuild --target and compare)",
        default=None,
        nargs="?",
    )
    target: str | None = option("target to rebuild and compare", metavar="NAME")
    until: str = option(
        "compare up to this stage (default: image)", default="image", choices=("wheels", "image")
    )
    trust: cosign.Trust
    project: ProjectOptions
    output: OutputOptions
    variant: VariantOptions = as_last()
    tools: ToolOptions


def run(options: Options) -> int:
    """Build a target a second time, or check an image; 20 if something differs."""
    required = cosign.required(options.trust)
    named = _published(options.image)
    if named is None and required and _signatures(options):
        return 0
    project = Project.open(options.project)
    if options.image is not None:
        return _image(options, options.image, project, named)
    if options.target is None:
        raise UsageError(
            "nothing to verify", "give an image, or a target to rebuild: --target NAME"
        )
    return _build_again(options, options.target, project)


def _signatures(options: Options) -> bool:
    """Check the signatures of the named subject; return whether there is nothing else to check."""
    named = Path(options.image) if options.image is not None else None
    if named is None and options.target is None:
        raise UsageError(
            "nothing to verify", "give a folder of published files, an image, or --target"
        )
    folder = pins_file(options.project.pins).parent / "dist" / str(options.target)
    if named is not None and (named.is_dir() or named.name == receipt.NAME):
        folder = named if named.is_dir() else named.parent
    elif named is not None:
        msg = f"{named}: signatures are next to a receipt.json, or next to an image in its registry"
        raise UsageError(msg, "give the receipt.json, or REPOSITORY@sha256:…")
    files = signing.check_folder(folder, options.trust)
    log.info(f"signed: {len(files)} files of {folder}")
    if named is None or not named.is_dir():
        return False
    log.document({"signed": sorted(set(files))})
    return True


def _build_again(options: Options, name: str, project: Project) -> int:
    """Build a target a second time, cold, and compare it with the store."""
    target = project.pins.target(name)
    variant = setup.last_variant(project, name, options.variant)
    here = MACHINES.get(platform.machine()) == platform_of(target)
    until = options.until if here else "wheels"  # the rest needs a machine of the target's platform
    context = setup.context_of(project, name, variant, until, tools=options.tools)
    if context.engine is None:
        until = "wheels"  # an environment's files have its path, so their bytes differ
    elif until != "wheels" and not context.engine.containerd_store:
        until = "wheels"
        log.warning(
            "only the wheels are compared: this engine's image store is not reproducible"
            " (daemon.json: containerd-snapshotter)"
        )
    log.heading(f"{context.target_name} on {context.platform}: first build")
    first = executor.build(context, until)
    with _cold(context) as again:
        log.heading("second build: another folder, no shared results, another umask")
        before = os.umask(0o077)
        try:
            second = executor.build(again, until)
        finally:
            os.umask(before)
        document, found = _compare(context, first, second)
    return _say(context.target_name, document, found)


def _say(
    name: str, document: Sequence[Mapping[str, str]], differences: Sequence[Difference]
) -> int:
    found = {"results": document, "differences": [asdict(difference) for difference in differences]}
    log.document({"target": name, "same": not differences, **found})
    if differences:
        msg = f"two builds of {name} differ:\n{_shortened([*map(str, differences)])}"
        remedy = (
            "make the step that wrote these bytes reproducible; if the first result is old or"
            f" damaged: build.py build --target {name} --force wheels --force image"
        )
        return log.failure(VerifyError(msg, remedy))
    for result in document:
        log.info(f"the same: {result['name']}  {result['second']}")
    return 0


def _shortened(lines: Sequence[str]) -> str:
    shown = "\n".join(f"  {plain.escaped(line)}" for line in lines[:_SHOWN])
    return shown + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def inputs(of: pins.Pins) -> tuple[str, ...]:
    """Return the files and folders of a checkout that a build reads."""
    return (*_INPUTS, *(() if of.plugin is None else (of.plugin.folder.rstrip("/"),)))


@contextmanager
def _cold(context: Context) -> Iterator[Context]:
    """Yield the same build in another folder, with a store of downloads only."""
    with context.store.temporary("verify") as work:
        root = work / "checkout"
        root.mkdir()
        for name in inputs(context.pins):
            path = context.root / name
            if path.is_dir():
                shutil.copytree(path, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.exists():
                shutil.copyfile(path, root / name)
        store = context.store.borrowed(work / "store", ("downloads", "partial"))
        yield replace(
            context,
            root=root,
            pins_path=root / context.pins_path.name,
            store=store,
            force=frozenset(),
            cold=True,
        )


def _compare(
    context: Context, first: Build, second: Build
) -> tuple[list[dict[str, str]], list[Difference]]:
    """Return each result with both hashes, and the differences."""
    document = []
    differences: list[Difference] = []
    for item, rebuilt in zip(first.graph.own, second.graph.own, strict=True):
        first_wheel = wheel_path(first.results.artefact(item))
        second_wheel = wheel_path(second.results.artefact(rebuilt))
        # read again: the record in the store is not enough here
        hashes = f"sha256:{sha256_file(first_wheel)}", f"sha256:{sha256_file(second_wheel)}"
        document.append({"name": second_wheel.name, "first": hashes[0], "second": hashes[1]})
        if hashes[0] != hashes[1] or first_wheel.name != second_wheel.name:
            differences += bytediff.wheels(first_wheel, second_wheel)
            _diffoscope(first_wheel, second_wheel)
    old, new = (build.results.step(build.graph.product) for build in (first, second))
    if old is None or new is None:
        return document, differences
    image, again = old.artefact.result, new.artefact.result
    if isinstance(image, ImageResult) and isinstance(again, ImageArchiveResult):
        digests = str(image.digest), str(again.digest)
        document.append({"name": image.tag, "first": digests[0], "second": digests[1]})
        if digests[0] != digests[1]:
            differences += _image_differences(
                context, image.image_id, new.artefact.path / again.archive
            )
    return document, differences


def _image_differences(context: Context, image_id: str, second: Path) -> list[Difference]:
    from sparkforge.inspect.verify import ociarchive, reading

    with reading.archive(image_id, context.store) as (first, _):
        found = ociarchive.compare(first, second)
        _diffoscope(first, second)
    return found


def _diffoscope(first: Path, second: Path) -> None:
    """Show diffoscope's report of a difference, if it is installed."""
    if not have("diffoscope"):
        return
    report = call("diffoscope", "--text", "-", first, second, check=False).stdout
    for line in report.decode(errors="replace").splitlines()[:_DIFFOSCOPE_LINES]:
        log.info(line)


# -- a single image ---------------------------------------------------------------------


def _published(text: str | None) -> Reference | None:
    """Return the named image in a registry (REGISTRY/NAME@sha256:…), or None."""
    if text is None or Path(text).exists() or "/" not in text:
        return None
    from sparkforge.runtime import registry

    return registry.reference(text)


def _image(options: Options, named: str, project: Project, there: Reference | None) -> int:
    """Print an image's contents, and compare it with this checkout.

    Args:
        there: the image in a registry, if it is one.
    """
    from sparkforge.build import image
    from sparkforge.inspect.verify import imagecheck, published, reading
    from sparkforge.runtime import engine

    attached, same_manifest = None, True
    if there is not None:
        if cosign.required(options.trust):
            attached = published.attached(there, options.trust)
        else:
            log.warning("the signature is not checked: give --key, or --identity and --issuer")
        holder = engine.connect()
        published.fetch(holder, there)
        same_manifest = holder.containerd_store
    store = project.store
    store.sweep()
    with reading.archive(named, store) as (path, promised):
        found = reading.read(path)
    name = found.labels[image.TARGET_LABEL]
    if options.target not in (None, name):
        raise UsageError(f"{named}: is of target {name}", f"omit --target {options.target}")
    target = project.pins.target(name)
    context = Context.of(project, name, _platform(found.platform, target))
    report = imagecheck.check(found, context, promised)
    if there is not None:
        report.problems += published.compare(there, found, attached, same_manifest=same_manifest)
    log.document({**asdict(report), "matches": not report.problems})
    log.heading(f"{report.target} {report.version}, {context.platform}, {report.digest}")
    log.info(f"base {report.base}")
    for upstream, labels in report.contents.items():
        tree = next((labels[key] for key in sorted(labels) if key.startswith("tree.")), "")
        log.info(
            f"{upstream} {labels.get('tag', '')}  commit {labels.get('commit', '')[:12]}  series"
            f" {labels.get('series', '')[:12]}  tree {tree[:12]}"
        )
    log.info("checked: " + ", ".join(f"{count} {what}" for what, count in report.checked.items()))
    if report.problems:
        msg = f"{named}: differs from what this checkout builds:\n{_shortened(report.problems)}"
        remedy = "check out the commit that it was built from, or rebuild it"
        return log.failure(VerifyError(msg, remedy))
    log.info("it matches this checkout")
    if there is not None:
        log.info(
            f"next     build.py rollback --target {name} {there}   # Compose uses it from then"
        )
    return 0


def _platform(stated: str, target: pins.Target) -> Platform:
    """Return an image's platform as one of the target's."""
    for allowed in target.platforms:
        if allowed == stated:
            return allowed
    msg = f"the image is for {stated}, but its target is not"
    raise ImageError(msg, f"the target's platforms: {', '.join(target.platforms)}")


COMMANDS = (Entry("verify", Options, run),)
