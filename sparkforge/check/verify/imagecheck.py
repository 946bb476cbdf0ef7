"""`build.py verify IMAGE`: compare an image's labels and files with this checkout.

The files come from ``docker export``: the engine unpacks the layers and checks their digests.
Nothing of the image runs.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sparkforge.build import graph, image
from sparkforge.build.cached import differences
from sparkforge.build.context import Context
from sparkforge.build.receipt import SBOM
from sparkforge.build.sbom import FILE
from sparkforge.build.stages.product import NOTE, comparable
from sparkforge.check.verify import installed
from sparkforge.check.verify.installed import File, Records, as_written
from sparkforge.core import plain
from sparkforge.core.disk import key_of, sha256_file
from sparkforge.core.errors import BuildError, MachineError, PinsError, UsageError
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.sources.wheelhouse import read_lock


@dataclass(frozen=True)
class Image:
    """An image in the engine.

    Attributes:
        digests: of its manifest; the last one is its id in the engine.
        files: by path without leading slash; {} before ``with_files``.
    """

    name: str
    digests: tuple[str, ...]
    platform: str
    labels: Mapping[str, str]
    files: Mapping[str, File] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The target of pins.yaml."""
        return self.labels[image.TARGET_LABEL]

    def share(self, name: str) -> bytes | None:
        """Return a file of the image's share folder; None if it is missing."""
        return self.files.get(f"{image.SHARE}/{name}", File("")).data


# -- reading -----------------------------------------------------------------------------


def find(engine: Engine, name: str) -> Image:
    """Return an image of sparkforge without its files.

    Raises:
        BuildError: the engine lacks it, or sparkforge did not build it.
    """
    from docker.errors import APIError

    try:
        attrs = engine.client.images.get(name).attrs
    except APIError as error:
        msg = f"{name}: no such image in the engine: {error.explanation or error}"
        raise BuildError(msg, "give a receipt.json, or a name from build.py images") from None
    labels = (attrs.get("Config") or {}).get("Labels") or {}
    if image.TARGET_LABEL not in labels:
        msg = f"{name}: not built by sparkforge: no label {image.TARGET_LABEL}"
        raise BuildError(msg, "give an image that build.py built")
    digests = [one.partition("@")[2] for one in attrs.get("RepoDigests") or ()]
    platform = f"{attrs['Os']}/{attrs['Architecture']}"
    return Image(name, (*dict.fromkeys(digests), str(attrs["Id"])), platform, labels)


def with_files(engine: Engine, found: Image) -> Image:
    """Return an image with its files, from a container that is never started."""
    container = engine.client.containers.create(found.digests[-1])
    try:
        stream = _Stream(cast("Iterator[bytes]", container.export()))
        with tarfile.open(fileobj=cast("Any", stream), mode="r|") as archive:
            return replace(found, files=files_of(archive))
    except tarfile.TarError as error:
        raise BuildError(f"{found.name}: docker export failed: {error}", "run it again") from None
    finally:
        container.remove(v=True)


class _Stream:
    """The pieces of an export as a file; tarfile takes pieces of any size."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        return next(self._pieces, b"")


def files_of(archive: tarfile.TarFile) -> dict[str, File]:
    """Return the files of an exported file system; RECORDs and our documents with their bytes."""
    result: dict[str, File] = {}
    for member in archive:
        name = _place(member.name)
        if member.isreg():
            stream: Any = archive.extractfile(member)
            if name.startswith(f"{image.SHARE}/") or name.endswith("/RECORD"):
                data = stream.read()
                result[name] = File(hashlib.sha256(data).hexdigest(), data)
            else:
                result[name] = File(hashlib.file_digest(stream, "sha256").hexdigest())
        elif member.islnk():
            result[name] = result.get(_place(member.linkname), File("link"))
        elif not member.isdir():
            result[name] = File(f"link to {member.linkname}")
    return result


def _place(name: str) -> str:
    return posixpath.normpath(f"/{name}").lstrip("/")


# -- checks ------------------------------------------------------------------------------


def check(found: Image, context: Context) -> tuple[dict[str, int], list[str]]:
    """Compare an image with itself and with the checkout.

    Returns:
        The number of comparisons by their kind, and one line for each difference.

    Raises:
        CheckError: a document in the image is not in the form that a build writes.
    """
    site = installed.site_of(context.target.python)
    records = installed.records(found.files, site)
    count, problems = installed.check(found.files, records, context)
    if f"{found.labels.get(SITE_PACKAGES_LABEL)}/" != f"/{site}":
        problems.append(f"label {SITE_PACKAGES_LABEL}: must be /{site}")
    problems += _notes(found, context)
    problems += _programs(found, context)
    problems += _sbom(found, context, records)
    wheels, differing = _wheels(found, context, records)
    counts = {"installed files": count, "wheels in dist": wheels}
    return counts, problems + differing


def _notes(found: Image, context: Context) -> Iterator[str]:
    """Compare the image's list of its inputs with its labels and with the checkout's inputs."""
    text = found.share(NOTE)
    if text is None:
        yield f"{NOTE}: not in the image"
        return
    with as_written(NOTE):
        theirs = plain.json_of(text)
        stated = {**theirs["image"]["labels"], image.KEY_LABEL: key_of(theirs["image"])}
        as_made, shared = _as_made(context, theirs), comparable(theirs)
    for name, value in stated.items():
        if found.labels.get(name) != value:
            yield f"label {name}: differs from {NOTE}"
    try:
        ours = graph.inputs_of_image(as_made, _base(context, found))
    except (BuildError, MachineError, PinsError, UsageError) as error:
        yield f"{NOTE}: the wheels were built in an unknown way: {error.what}"
    else:
        yield from differences(shared, comparable(ours))


def _as_made(context: Context, note: Mapping[str, Any]) -> Context:
    """Return the same build with the image's kind of wheels (overlaid or compiled) and its pack."""
    stated = str(note["image"]["labels"].get(image.PACK_LABEL, ""))
    context = replace(context, pack=tuple(filter(None, stated.split(image.PACK_JOINT))))
    compiled = any("builder" in inputs for inputs in note.values())
    return replace(context, wheels="compile") if compiled else context


def _base(context: Context, found: Image) -> BaseImage:
    """Return this checkout's pinned base; without a pin, the image's."""
    if context.target.base is None:
        stated = found.labels.get("org.opencontainers.image.base.digest", "")
        return BaseImage(stated, stated)
    pinned = context.pins.images[context.target.base]
    digest = pinned.digest(context.platform)
    return BaseImage(f"{pinned.repository}@{digest}", digest)


def _programs(found: Image, context: Context) -> Iterator[str]:
    """Compare our programs and the profile in the image with the checkout's."""
    folder = f"{image.PROGRAMS}/"
    wanted = {
        folder + name.removeprefix("scripts/"): sha256_file(context.root / name)
        for name in image.RECIPE
        if name != "Dockerfile"
    }
    there = {path: one.sha256 for path, one in found.files.items() if path.startswith(folder)}
    for path in sorted(there.keys() | wanted.keys()):
        if there.get(path) != wanted.get(path):
            yield f"{path}: missing, or differs from the checkout"
    text = found.share("profile.json")
    with as_written("profile.json"):
        profile = None if text is None else json.loads(text)
    if profile != (context.profile or None):
        yield f"profile.json: differs from the profile of {found.target}"


def _sbom_wheels(found: Image) -> list[tuple[str, str, str, str]]:
    """Return reference, name, file and sha256 of each wheel in the image's SBOM."""
    text = found.share(SBOM) or b'{"components": []}'
    with as_written(SBOM):
        return [
            (
                part["bom-ref"],
                part["name"],
                next(one["value"] for one in part["properties"] if one["name"] == FILE),
                part["hashes"][0]["content"],
            )
            for part in json.loads(text)["components"]
            if part["bom-ref"].startswith(("wheel-", "own-"))
        ]


def _sbom(found: Image, context: Context, records: Records) -> Iterator[str]:
    """Compare the SBOM with its label, the lock and the installed packages."""
    text = found.share(SBOM) or b""
    if hashlib.sha256(text).hexdigest() != found.labels.get(image.SBOM_LABEL):
        yield f"{SBOM}: missing, or differs from the label {image.SBOM_LABEL}"
    locked = {item.name: item.sha256s for item in read_lock(context.lock)}
    wheels = _sbom_wheels(found)
    for reference, name, _, sha256 in wheels:
        if reference.startswith("wheel-") and sha256 not in locked.get(name, ()):
            yield f"{SBOM}: {name}: no such wheel in {context.lock.name}"
    named = {name for _, name, _, _ in wheels}
    there = {installed.name_of(folder) for folder in records}
    for name in sorted(named ^ there):
        yield f"{name}: not installed" if name in named else f"{name}: not in {SBOM}"


def _wheels(found: Image, context: Context, records: Records) -> tuple[int, list[str]]:
    """Compare our installed wheels with dist/; those of another release have other names.

    Returns:
        The number of compared wheels, and one line for each difference.
    """
    site, folder = installed.site_of(context.target.python), context.root / "dist" / found.target
    there = [
        (folder / file, sha256)
        for _, _, file, sha256 in _sbom_wheels(found)
        if "/" not in file and (folder / file).is_file()
    ]
    problems = [
        line
        for path, sha256 in there
        for line in installed.against_wheel(path, sha256, records, site)
    ]
    return len(there), problems
