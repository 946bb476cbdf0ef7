"""`build.py verify`: compare with a second, cold build, or compare an image with this checkout."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated
from zipfile import BadZipFile, ZipFile

from cyclopts import Parameter

from sparkforge.build import receipt, setup
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.options import OutputOptions, ToolOptions, VariantOptions, platform_of
from sparkforge.build.results import ImageArchiveResult, ImageResult
from sparkforge.build.stages.wheels import wheel_path
from sparkforge.check.verify import signing
from sparkforge.core import plain
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError, CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import call, have
from sparkforge.pins.pins import Pins
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import registry
from sparkforge.sources.project import Project, ProjectOptions

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


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``verify``."""

    image: str | None = field(default=None, kw_only=False)
    """image to compare with this checkout: a receipt.json, a name that the engine knows, or
    REGISTRY/NAME@sha256:…; with --key or --identity its signature is checked first; with these
    also the folder of a release"""
    target: str | None = None
    """target to rebuild and compare"""
    until: Annotated[str, Parameter(choices=("wheels", "image"))] = "image"
    """compare up to this stage (default: image)"""
    trust: signing.Trust = signing.Trust()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    tools: ToolOptions = ToolOptions()


def run(options: Options = Options()) -> int:
    """Build a target a second time, or check an image; CheckError if something differs."""
    signed = signing.required(options.trust)
    if (options.image is None) == (options.target is None) or (signed and options.target):
        raise UsageError("give an image, or --target NAME without --key", "build.py verify --help")
    if options.image is None:
        return _build_again(options, str(options.target), Project.open(options.project))
    published = registry.reference(options.image)
    if signed and published is None:
        files = signing.check_folder(Path(options.image), options.trust)
        log.info(f"signed: {len(files)} files of {options.image}")
        log.document({"signed": files})
        return 0
    if signed:
        signing.check_image(options.image, options.trust)
    elif published is not None:
        log.warning("the signature is not checked: give --key, or --identity and --issuer")
    return _image(options.image, published, Project.open(options.project))


# -- a target ----------------------------------------------------------------------------


def _build_again(options: Options, name: str, project: Project) -> int:
    """Build a target a second time, cold, and compare it with dist/ and the store."""
    target = project.pins.target(name)
    variant = setup.last_variant(project, name, options.variant)
    here = MACHINES.get(platform.machine()) == platform_of(target)
    until = options.until if here else "wheels"  # the rest needs a machine of the target's platform
    first = setup.build_of(project, name, variant, until, tools=options.tools)
    context, engine = first.context, first.tools.engine
    if engine is None:
        until = "wheels"  # an environment's files have its path, so their bytes differ
    elif until != "wheels" and not engine.containerd_store:
        until = "wheels"
        log.warning(
            "only the wheels are compared: this engine's image store is not reproducible"
            " (daemon.json: containerd-snapshotter)"
        )
    log.heading(f"{context.target_name} on {context.platform}: first build")
    first.run(until)
    with _cold(first) as second:
        log.heading("second build: another folder, no shared results, another umask")
        before = os.umask(0o077)
        try:
            second.run(until)
        finally:
            os.umask(before)
        results, found = _compare(first, second)
    log.document({"target": name, "same": not found, "results": results, "differences": found})
    if found:
        msg = f"two builds of {name} differ:\n{_shortened(found)}"
        remedy = (
            "make the step that wrote these bytes reproducible; if the first result is old or"
            f" damaged: build.py build --target {name} --force wheels --force image"
        )
        return log.failure(CheckError(msg, remedy))
    for result in results:
        log.info(f"the same: {result['name']}  {result['second']}")
    return 0


def _shortened(lines: Sequence[str]) -> str:
    shown = "\n".join(f"  {plain.escaped(line)}" for line in lines[:_SHOWN])
    return shown + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def inputs(of: Pins) -> tuple[str, ...]:
    """Return the files and folders of a checkout that a build reads."""
    return (*_INPUTS, *(() if of.plugin is None else (of.plugin.folder.rstrip("/"),)))


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


def _compare(first: Build, second: Build) -> tuple[list[dict[str, str]], list[str]]:
    """Return each result with both hashes, and one line for each difference.

    The first of two wheels is the one in dist/, where there is one.
    """
    dist = first.context.dist
    results = []
    found = receipt.problems(dist) if (dist / receipt.NAME).is_file() else []
    found = [f"{dist}: {problem}" for problem in found]
    for item, rebuilt in zip(first.graph.own, second.graph.own, strict=True):
        new = wheel_path(rebuilt)
        old = dist / new.name
        old = old if old.is_file() else wheel_path(item)
        # read again: the record in the store is not enough here
        hashes = f"sha256:{sha256_file(old)}", f"sha256:{sha256_file(new)}"
        results.append({"name": new.name, "first": hashes[0], "second": hashes[1]})
        if hashes[0] != hashes[1] or old.name != new.name:
            found += _members(old, new)
            _diffoscope(old, new)
    products = [build.graph.product.found for build in (first, second)]
    image, again = (product and product.result for product in products)
    if isinstance(image, ImageResult) and isinstance(again, ImageArchiveResult):
        digests = str(image.digest), str(again.digest)
        results.append({"name": image.tag, "first": digests[0], "second": digests[1]})
        if digests[0] != digests[1]:
            found.append(f"{image.tag}: digest {digests[0]} → {digests[1]}")
            if have("diffoscope") and products[1] is not None:
                with first.context.store.temporary("image") as work:
                    call("docker", "save", "--output", work / "image.tar", "--", image.image_id)
                    _diffoscope(work / "image.tar", products[1].path / again.archive)
    return results, found


def _members(first: Path, second: Path) -> list[str]:
    """Return the members in which two wheels differ; if there are none, the wheels."""
    facts: list[dict[str, object]] = []
    try:
        for wheel in (first, second):
            with ZipFile(wheel) as archive:
                facts.append(
                    {
                        one.filename: (one.CRC, one.file_size, one.date_time, one.external_attr)
                        for one in archive.infolist()
                    }
                )
    except BadZipFile as error:
        return [f"{first}: {error}"]
    old, new = facts
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    same = f"{first}: the same members in another archive, or damaged"
    return [f"{second.name}: {name} differs" for name in names] or [same]


def _diffoscope(first: Path, second: Path) -> None:
    """Show diffoscope's report of a difference, if it is installed."""
    if not have("diffoscope"):
        log.info("install diffoscope to see the bytes that differ")
        return
    report = call("diffoscope", "--text", "-", first, second, check=False).stdout
    for line in report.decode(errors="replace").splitlines()[:_DIFFOSCOPE_LINES]:
        log.info(line)


# -- an image ----------------------------------------------------------------------------


def _image(named: str, published: registry.Reference | None, project: Project) -> int:
    """Print an image's contents, and compare it with this checkout."""
    from sparkforge.check.verify import imagecheck
    from sparkforge.runtime import engine

    promised = None
    if Path(named).is_file():
        built = receipt.load(Path(named))
        if built is None or built.image is None:
            msg = f"{named}: not the receipt of an image build"
            raise UsageError(msg, "give the receipt.json of an image build, or the image")
        named, promised = built.image.image_id, built.image.digest
    holder = engine.connect()
    if published is not None and not holder.has_image(named):
        registry.pull(published)
    found = imagecheck.find(holder, named)
    platforms = project.pins.target(found.target).platforms
    image_platform = next((one for one in platforms if one == found.platform), None)
    if image_platform is None:
        msg = f"{named}: is for {found.platform}, but its target is not"
        raise BuildError(msg, f"the target's platforms: {', '.join(platforms)}")
    context = Context.of(project, found.target, image_platform)
    checked, problems = imagecheck.check(imagecheck.with_files(holder, found), context)
    if promised is not None and promised not in found.digests:
        problems.insert(0, f"the receipt says {promised}, the engine has {found.digests[0]}")
    labels = {name: text for name, text in sorted(found.labels.items()) if name.startswith("org.")}
    log.document(
        {
            "digest": promised or found.digests[0],
            "target": found.target,
            "labels": labels,
            "checked": checked,
            "problems": problems,
            "matches": not problems,
        }
    )
    log.heading(f"{found.target}, {context.platform}, {found.digests[0]}")
    for name, text in labels.items():
        log.info(f"{name}  {text}")
    log.info("checked: " + ", ".join(f"{count} {what}" for what, count in checked.items()))
    if problems:
        msg = f"{named}: differs from what this checkout builds:\n{_shortened(problems)}"
        remedy = "check out the commit that it was built from, or rebuild it"
        return log.failure(CheckError(msg, remedy))
    log.info("it matches this checkout")
    if published is not None:
        log.info(f"next     build.py rollback --target {found.target} {published}")
    return 0
