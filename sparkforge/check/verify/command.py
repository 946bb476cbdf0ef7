"""`build.py verify`: compare with a second, cold build, or compare an image with this checkout."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sparkforge.build import image, receipt, setup
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.options import (
    OutputOptions,
    ToolOptions,
    VariantOptions,
    command_options,
    platform_of,
)
from sparkforge.build.results import ImageArchiveResult
from sparkforge.build.stages.wheels import wheel_path
from sparkforge.core import plain
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError, CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call, have
from sparkforge.pins.types import MACHINES
from sparkforge.release.command import check_folder, check_image, check_key, inputs
from sparkforge.runtime import engine
from sparkforge.sources.project import Project, ProjectOptions

_SHOWN = 20
_MOST_SHOWN = 20_000  # bytes of diffoscope's report


@command_options
class Options:
    """Options of ``verify``."""

    image: str | None = field(default=None, kw_only=False)
    """image to compare with this checkout: a receipt.json, a name that the engine knows, or
    REGISTRY/NAME@sha256:…; with --key its signature is checked first; with it also the
    folder of a release"""
    target: str | None = None
    """target to rebuild and compare"""
    until: Annotated[str, Parameter(choices=("wheels", "image"))] = "image"
    """compare up to this stage (default: image)"""
    key: str | None = None
    """require signatures by this public key"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()


def run(options: Options = Options()) -> int:
    """Build a target a second time, or check an image; CheckError if something differs."""
    check_key(options.key)
    if (options.image is None) == (options.target is None) or (options.key and options.target):
        raise UsageError("give an image, or --target NAME without --key", "build.py verify --help")
    if options.image is None:
        return _build_again(options, str(options.target), Project.open(options.project))
    published = engine.is_published(options.image)
    if options.key and not published:
        files = check_folder(Path(options.image), options.key)
        log.info(f"signed: {len(files)} files of {options.image}")
        log.document({"signed": files})
        return 0
    if options.key:
        check_image(options.image, options.key)
    elif published:
        log.warning("the signature is not checked: give --key")
    return _image(options.image, Project.open(options.project), published=published)


# -- a target ----------------------------------------------------------------------------


def _build_again(options: Options, name: str, project: Project) -> int:
    """Build a target from scratch, and compare the result byte for byte with dist/."""
    target, dist = project.pins.target(name), project.root / "dist" / name
    built = receipt.load(dist / receipt.NAME)
    if built is None:
        msg = f"{dist}: has no valid {receipt.NAME}, so nothing to verify"
        raise UsageError(msg, f"build it first: build.py --target {name}")
    variant = setup.last_variant(project, name, options.variant)
    here = MACHINES.get(platform.machine()) == platform_of(target)
    until = options.until if here and built.image is not None else "wheels"
    build = setup.build_of(project, name, variant, until, tools=options.tools)
    if build.tools.engine is None or not build.tools.engine.containerd_store:
        until = "wheels"  # environments, and images in another store, differ in every build
    log.info(f"comparing {'the wheels and the image' if until == 'image' else 'the wheels'}")
    found = [f"{dist}: {problem}" for problem in receipt.problems(dist, built)]
    results: list[tuple[str, str | None, str | None]] = []
    with _cold(build) as again:
        before = os.umask(0o077)
        try:
            again.run(until)
        finally:
            os.umask(before)
        made = (item for item in again.graph.own if item.found is not None)  # up to that stage
        for new in map(wheel_path, made):
            old = dist / new.name
            results.append((new.name, sha256_file(old) if old.is_file() else "", sha256_file(new)))
            if results[-1][1] != results[-1][2] and have("diffoscope"):
                limit = f"--max-text-report-size={_MOST_SHOWN}"
                call("diffoscope", limit, "--text", "-", old, new, check=False, stream=True)
        product = again.graph.product.found
        if product is not None and isinstance(product.result, ImageArchiveResult) and built.image:
            results.append((built.image.tag, built.image.digest, product.result.digest))
    for what, first, second in results:
        if first == second:
            log.info(f"the same: {what}  {second}")
        else:
            found.append(f"{what}: {first or 'missing'} → {second}")
    rows = [dict(zip(("name", "first", "second"), row, strict=True)) for row in results]
    log.document({"target": name, "same": not found, "results": rows, "differences": found})
    if not found:
        return 0
    msg = f"{dist} differs from a build of this checkout:\n{_shortened(found)}"
    remedy = f"if dist is old or damaged: build.py build --target {name} --force wheels"
    return log.failure(CheckError(msg, f"{remedy}; diffoscope shows what differs"))


def _shortened(lines: Sequence[str]) -> str:
    shown = "\n".join(f"  {plain.escaped(line)}" for line in lines[:_SHOWN])
    return shown + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


@contextmanager
def _cold(build: Build) -> Iterator[Build]:
    """Yield the same build in another folder, with a store of downloads only."""
    context = build.context
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
        again = replace(context, pins_path=root / context.pins_path.name, store=store)
        yield Build(again, replace(build.tools, cold=True), build.serving)


# -- an image ----------------------------------------------------------------------------


def _image(named: str, project: Project, *, published: bool) -> int:
    """Print an image's contents, and compare it with this checkout."""
    from sparkforge.check.verify import imagecheck

    promised = None
    if Path(named).is_file():
        built = receipt.load(Path(named))
        if built is None or built.image is None:
            msg = f"{named}: not the receipt of an image build"
            raise UsageError(msg, "give the receipt.json of an image build, or the image")
        named, promised = built.image.image_id, built.image.digest
    holder = engine.connect()
    if published and holder.image_id(named) is None:
        engine.registry("pull", named)
    found = imagecheck.read(holder, named)
    name = found.labels[image.TARGET_LABEL]
    platforms = project.pins.target(name).platforms
    kind = next((one for one in platforms if one == found.platform), None)
    if kind is None:
        msg = f"{named}: is for {found.platform}, but its target is not"
        raise BuildError(msg, f"the target's platforms: {', '.join(platforms)}")
    checked, problems = imagecheck.check(found, Context.of(project, name, kind))
    if promised is not None and promised not in found.digests:
        problems.insert(0, f"the receipt says {promised}, the engine has {found.digests[0]}")
    labels = {label: text for label, text in found.labels.items() if label.startswith("org.")}
    document = {"digest": promised or found.digests[0], "target": name, "labels": labels}
    log.document({**document, "checked": checked, "problems": problems, "matches": not problems})
    log.heading(f"{name}, {found.platform}, {found.digests[0]}")
    log.info("checked: " + ", ".join(f"{count} {what}" for what, count in checked.items()))
    if problems:
        msg = f"{named}: differs from what this checkout builds:\n{_shortened(problems)}"
        remedy = "check out the commit that it was built from, or rebuild it"
        return log.failure(CheckError(msg, remedy))
    log.info("it matches this checkout")
    return 0
