"""`build.py verify`: compare with a second, cold build, or compare an image with this checkout."""

import csv
import hashlib
import io
import json
import os
import platform
import posixpath
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast
from zipfile import ZipFile

from cyclopts import Parameter

from sparkforge.build import graph, image, receipt
from sparkforge.build.cached import differences
from sparkforge.build.context import Context
from sparkforge.build.graph import Build, build_of, last_variant
from sparkforge.build.image import NOTE, VENV, comparable
from sparkforge.build.options import (
    OutputOptions,
    ToolOptions,
    VariantOptions,
    command_options,
    platform_of,
)
from sparkforge.build.results import ImageArchiveResult
from sparkforge.build.stages.wheels import hashed
from sparkforge.core import plain
from sparkforge.core.disk import key_of, sha256_file
from sparkforge.core.errors import BuildError, CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.core.plain import record_rows
from sparkforge.core.run import call
from sparkforge.pins.types import MACHINES
from sparkforge.release.command import check_folder, check_image, check_key, inputs
from sparkforge.runtime import engine
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.sources.project import Project, ProjectOptions

_SHOWN = 20
Records = Mapping[str, Mapping[str, str]]
"""Paths with their sha256 ("" if not stated) by distribution: its .dist-info folder."""
CHANGED: Mapping[str, str] = {
    "2fb85f8bcd33c13e240ef2a8c6277f4d5a0260b629ecf9a242a04f1403f582a8": "121.cpython-312-x86_64",
    "14f12a7977c2f681fb01693e41434308bfb5cf0e2c31ed2c29d1176337c86462": "130.cpython-312-x86_64",
    "9093385e491101daacfe696e9de11451f9814f5ba39101d7b000136c69538060": "121.cpython-312-aarch64",
    "621e5e65910c0bec1b1960d49b0d38e02fe73a511707031b860e987eb0887e35": "130.cpython-312-aarch64",
}
"""Libraries that PyNvVideoCodec 2.0.4 changed after its RECORD was written, by their sha256."""


@command_options
class Options:
    image: str | None = field(default=None, kw_only=False)
    """image to compare with this checkout: a name that the engine knows, or
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


def _build_again(options: Options, target: str, project: Project) -> int:
    """Build a target from scratch, and compare the result byte for byte with dist/."""
    pinned, dist = project.pins.target(target), project.root / "dist" / target
    built = receipt.load(dist / receipt.NAME)
    if built is None:
        msg = f"{dist}: has no valid {receipt.NAME}, so nothing to verify"
        raise UsageError(msg, f"build it first: build.py --target {target}")
    variant = last_variant(project, target, options.variant)
    here = MACHINES.get(platform.machine()) == platform_of(pinned)
    until = options.until if here and built.image is not None else "wheels"
    build = build_of(project, target, variant, until, tools=options.tools)
    if build.tools.engine is None or not build.tools.engine.containerd_store:
        until = "wheels"  # environments, and images in another store, differ in every build
    log.info(f"comparing {'the wheels and the image' if until == 'image' else 'the wheels'}")
    found = [f"{dist}: {problem}" for problem in receipt.problems(dist, built)]
    results: list[dict[str, str | None]] = []
    context = build.context
    # in another folder, with a store of downloads only
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
        cold = replace(context, pins_path=root / context.pins_path.name, store=store)
        again = Build(cold, replace(build.tools, cold=True))
        before = os.umask(0o077)
        try:
            again.run(until)
        finally:
            os.umask(before)
        made = (item for item in again.graph.own if item.found is not None)  # up to that stage
        for new in hashed(made):
            old = dist / new.name
            first, second = sha256_file(old) if old.is_file() else "", sha256_file(new)
            results.append({"name": new.name, "first": first, "second": second})
            if first != second and shutil.which("diffoscope"):
                words = ("--max-text-report-size=20000", "--text", "-", old, new)
                call("diffoscope", *words, check=False, stream=True)
        product = again.graph.product.found
        if product is not None and isinstance(product.result, ImageArchiveResult) and built.image:
            results.append({"name": built.image.tag, "first": built.image.digest})
            results[-1]["second"] = product.result.digest
    for one in results:
        if one["first"] == one["second"]:
            log.info(f"the same: {one['name']}  {one['second']}")
        else:
            found.append(f"{one['name']}: {one['first'] or 'missing'} → {one['second']}")
    log.document({"target": target, "same": not found, "results": results, "differences": found})
    if not found:
        return 0
    msg = f"{dist} differs from a build of this checkout:\n{_shortened(found)}"
    remedy = f"if dist is old or damaged: build.py build --target {target} --force wheels"
    return log.failure(CheckError(msg, f"{remedy}; diffoscope shows what differs"))


def _shortened(lines: Sequence[str]) -> str:
    shown = "\n".join(f"  {plain.escaped(line)}" for line in lines[:_SHOWN])
    return shown + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


# -- an image ----------------------------------------------------------------------------


def _image(named: str, project: Project, *, published: bool) -> int:
    """Print an image's contents, and compare it with this checkout."""
    holder = engine.connect()
    if published and holder.image_id(named) is None:
        engine.registry("pull", named)
    found = read(holder, named)
    name = found.labels[image.TARGET_LABEL]
    platforms = project.pins.target(name).platforms
    if (kind := next((one for one in platforms if one == found.platform), None)) is None:
        msg = f"{named}: is for {found.platform}, but its target is not"
        raise BuildError(msg, f"the target's platforms: {', '.join(platforms)}")
    checked, problems = check(found, Context.of(project, name, kind))
    labels = {label: text for label, text in found.labels.items() if label.startswith("org.")}
    document = {"digest": found.digests[0], "target": name, "labels": labels}
    log.document({**document, "checked": checked, "problems": problems, "matches": not problems})
    log.heading(f"{name}, {found.platform}, {found.digests[0]}")
    log.info("checked: " + ", ".join(f"{count} {what}" for what, count in checked.items()))
    if problems:
        msg = f"{named}: differs from what this checkout builds:\n{_shortened(problems)}"
        remedy = "check out the commit that it was built from, or rebuild it"
        return log.failure(CheckError(msg, remedy))
    log.info("it matches this checkout")
    return 0


@dataclass(frozen=True)
class Image:
    """An image in the engine; the last of ``digests`` is its id, others its manifest's."""

    name: str
    digests: tuple[str, ...]
    platform: str
    labels: Mapping[str, str]
    files: Mapping[str, str]
    """The sha256 of each file, by path without leading slash; of a link: ``link to …``."""
    documents: Mapping[str, bytes]
    """RECORDs, and what is in our share folder."""

    def share(self, name: str) -> bytes:
        """Return a file of the image's share folder; b"" if it is missing."""
        return self.documents.get(f"{image.SHARE}/{name}", b"")


def read(engine: Engine, name: str) -> Image:
    """Return an image of sparkforge; BuildError if the engine has none of that name.

    The engine unpacks the layers and checks their digests. Nothing of the image runs.
    """
    from docker.errors import APIError

    try:
        attrs = engine.client.images.get(name).attrs
    except APIError as error:
        msg = f"{name}: no such image in the engine: {error.explanation or error}"
        raise BuildError(msg, "give a name from build.py images") from None
    labels = (attrs.get("Config") or {}).get("Labels") or {}
    if image.TARGET_LABEL not in labels:
        msg = f"{name}: not built by sparkforge: no label {image.TARGET_LABEL}"
        raise BuildError(msg, "give an image that build.py built")
    digests = [one.partition("@")[2] for one in attrs.get("RepoDigests") or ()]
    platform = f"{attrs['Os']}/{attrs['Architecture']}"
    files: dict[str, str] = {}
    documents: dict[str, bytes] = {}
    container = engine.client.containers.create(attrs["Id"])  # never started
    try:
        pieces = cast("Iterator[bytes]", container.export())
        stream: Any = SimpleNamespace(read=lambda _: next(pieces, b""))  # of any size
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                path = _normal(member.name)
                if member.isreg():
                    source: Any = archive.extractfile(member)
                    if path.startswith(f"{image.SHARE}/") or path.endswith("/RECORD"):
                        documents[path] = source.read()
                        source = io.BytesIO(documents[path])
                    files[path] = hashlib.file_digest(source, "sha256").hexdigest()
                elif member.islnk():
                    files[path] = files.get(_normal(member.linkname), "link")
                elif not member.isdir():
                    files[path] = f"link to {member.linkname}"
    finally:
        container.remove(v=True)
    all_digests = (*dict.fromkeys(digests), str(attrs["Id"]))
    return Image(name, all_digests, platform, labels, files, documents)


def _normal(path: str) -> str:
    """Return a path from the root, without leading slash."""
    return posixpath.normpath(f"/{path}").lstrip("/")


def check(found: Image, context: Context) -> tuple[dict[str, int], list[str]]:
    """Compare an image with itself and the checkout; returns counts, and a line a difference."""
    python = context.target.python
    site = site_of(python)
    try:
        stated = records(found.documents, site)
        note = json.loads(found.share(NOTE))
        profile = json.loads(found.share("profile.json") or b"null")
        count, problems = installed(found.files, stated, python)
        problems += [
            *_labels(found, note, site),
            *_inputs(found, note, context),
            *_programs(found, context),
        ]
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        msg = f"{found.name}: a document in it is not in the form that a build writes: {error!r}"
        raise CheckError(msg, "build the image again") from None
    if profile != (context.serving.document() or None):
        problems.append(f"profile.json: differs from the profile of {context.target_name}")
    wheels = sorted(context.dist.glob("*.whl"))
    for wheel in wheels:
        with ZipFile(wheel) as opened:
            record = next(n for n in opened.namelist() if n.endswith(".dist-info/RECORD"))
            rows = _rows(opened.read(record), site)
        # one of another release is not compared
        there = stated.get(record.rpartition("/")[0], rows)
        for name, sha256 in rows.items():
            # installers move the members of .data/, and compile byte code again
            moved = not sha256 or ".data/" in name or _byte_code(name)
            if not moved and there.get(name) != sha256:
                problems.append(f"{name}: differs from {wheel}")
    return {"installed files": count, "wheels in dist": len(wheels)}, problems


# -- installed files ---------------------------------------------------------------------


def site_of(python: str) -> str:
    """Return the folder of packages in our images for a Python such as 3.11, with a last slash."""
    return f"{VENV}/lib/python{python}/site-packages/"


def records(documents: Mapping[str, bytes], site: str) -> Records:
    """Return the RECORDs of the distributions in a folder of packages."""
    # one level down: vendored packages (in setuptools) are files, not installed
    pattern = re.compile(rf"{re.escape(site)}[^/]+/RECORD")
    paths = filter(pattern.fullmatch, documents)
    return {path.split("/")[-2]: _rows(documents[path], site) for path in paths}


def _rows(record: bytes, site: str) -> dict[str, str]:
    """Return the paths of a RECORD below the root, with their sha256 in hex, or ""."""
    return {_normal(f"{site}/{path}"): sha256 for path, sha256 in record_rows(record).items()}


def _byte_code(path: str) -> bool:
    """Return whether Python uses a file with its source only, which is checked."""
    return re.search(r"/__pycache__/[^/]+\.pyc$", path) is not None


def installed(files: Mapping[str, str], of: Records, python: str) -> tuple[int, list[str]]:
    """Compare every file of the environment with the RECORDs; as ``check``."""
    site = site_of(python)
    stated: dict[str, dict[str, str]] = {}  # hashes of a path, by distribution
    for folder, rows in of.items():
        for path, sha256 in rows.items():
            # a wheel's byte code is compiled again, with the hash of its source
            if not _byte_code(path):
                stated.setdefault(path, {})[folder] = sha256
    problems = []
    for path, hashes in stated.items():
        found = files.get(path, "missing")
        # a RECORD has no hash of itself, and may lack others of its own folder; of a file in two
        # packages the later one's stays
        free = ".dist-info/" in path and not all(hashes.values())
        known = path.endswith(f"/PyNvVideoCodec_{CHANGED.get(found)}-linux-gnu.so")
        if not (free or known or found in hashes.values()):
            problems.append(f"{path}: missing, or differs from {next(iter(hashes))}/RECORD")
    own = of_the_venv(python)
    for path, sha256 in own.items():
        if files.get(path) != sha256:
            problems.append(f"{path}: differs from what the Dockerfile writes")
    for path in files.keys() - own.keys() - stated.keys():
        if site.startswith(f"{path}/"):
            problems.append(f"{path}: must be a folder, of the environment")
        elif path.startswith(f"{VENV}/") and not _byte_code(path):
            problems.append(f"{path}: in no distribution's RECORD")
    return len(stated), sorted(problems)


def of_the_venv(python: str) -> dict[str, str]:
    """Return the hashes of the environment's files that are in no distribution."""
    settings = hashlib.sha256(b"home = /usr/bin\ninclude-system-site-packages = false\n")
    links = {"python": f"/usr/bin/python{python}", f"python{python}": "python", "python3": "python"}
    found = {f"{VENV}/bin/{name}": f"link to {target}" for name, target in links.items()}
    return {**found, f"{VENV}/lib64": "link to lib", f"{VENV}/pyvenv.cfg": settings.hexdigest()}


# -- labels and documents ----------------------------------------------------------------


def _labels(found: Image, note: Mapping[str, Any], site: str) -> Iterator[str]:
    stated = {**note["image"]["labels"], image.KEY_LABEL: key_of(note["image"])}
    stated[image.SBOM_LABEL] = hashlib.sha256(found.share(receipt.SBOM)).hexdigest()
    stated[SITE_PACKAGES_LABEL] = f"/{site}".rstrip("/")
    for name, value in stated.items():
        if found.labels.get(name) != value:
            yield f"label {name}: differs from the image's documents"


def _inputs(found: Image, note: Mapping[str, Any], context: Context) -> Iterator[str]:
    """Compare the image's list of its inputs with the inputs of the same build of the checkout."""
    packed = str(note["image"]["labels"].get(image.PACK_LABEL, ""))
    as_made = replace(context, pack=tuple(filter(None, packed.split(image.PACK_JOINT))))
    if any("builder" in inputs for inputs in note.values()):
        as_made = replace(as_made, wheels="compile")
    digest = found.labels.get("org.opencontainers.image.base.digest", "")
    base = BaseImage(digest, digest)  # without a pin, the image's
    if context.target.base is not None:
        pinned = context.pins.images[context.target.base]
        digest = pinned.digest(context.platform)
        base = BaseImage(f"{pinned.repository}@{digest}", digest)
    yield from differences(comparable(note), comparable(graph.inputs_of_image(as_made, base)))


def _programs(found: Image, context: Context) -> Iterator[str]:
    folder = f"{image.PROGRAMS}/"
    wanted = {
        folder + name.removeprefix("scripts/"): sha256_file(context.root / name)
        for name in image.RECIPE
        if name != "Dockerfile"
    }
    there = {path: one for path, one in found.files.items() if path.startswith(folder)}
    for path in sorted(there.keys() | wanted.keys()):
        if there.get(path) != wanted.get(path):
            yield f"{path}: missing, or differs from the checkout"
