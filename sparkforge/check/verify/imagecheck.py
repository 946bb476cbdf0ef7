"""`build.py verify IMAGE`: compare an image with its own records and with this checkout."""

import base64
import csv
import hashlib
import io
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast
from zipfile import ZipFile

from packaging.utils import canonicalize_name

from sparkforge.build import graph, image
from sparkforge.build.cached import differences
from sparkforge.build.context import Context
from sparkforge.build.image import VENV
from sparkforge.build.receipt import SBOM
from sparkforge.build.stages.product import NOTE, comparable
from sparkforge.check.verify.exported import exported
from sparkforge.core.disk import key_of, sha256_file
from sparkforge.core.errors import BuildError, CheckError
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.runtime.servers import SITE_PACKAGES_LABEL
from sparkforge.sources.wheelhouse import read_lock

Records = Mapping[str, Mapping[str, str]]
"""Paths with their sha256 ("" if not stated) by distribution: its .dist-info folder."""


class File(NamedTuple):
    """A file of an image; ``sha256`` of a link: ``link to`` and its target."""

    sha256: str
    data: bytes | None = None
    """Of RECORDs and of our own documents."""


_GONE = File("missing")


@dataclass(frozen=True)
class Image:
    """An image in the engine; the last of ``digests`` is its id, others its manifest's."""

    name: str
    digests: tuple[str, ...]
    platform: str
    labels: Mapping[str, str]
    files: Mapping[str, File]
    """By path without leading slash."""

    def share(self, name: str) -> bytes:
        """Return a file of the image's share folder; b"" if it is missing."""
        return self.files.get(f"{image.SHARE}/{name}", File("")).data or b""


def read(engine: Engine, name: str) -> Image:
    """Return an image of sparkforge; BuildError if the engine has none of that name."""
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
    container = engine.client.containers.create(attrs["Id"])  # never started
    try:
        files = _files(cast("Iterator[bytes]", container.export()))
    finally:
        container.remove(v=True)
    platform = f"{attrs['Os']}/{attrs['Architecture']}"
    return Image(name, (*dict.fromkeys(digests), str(attrs["Id"])), platform, labels, files)


def _files(pieces: Iterator[bytes]) -> dict[str, File]:
    """Return the files of an export by path; RECORDs and our documents with their bytes."""
    seen: dict[str, File] = {}
    for path, member, content in exported(pieces):
        if content is not None:
            kept = path.startswith(f"{image.SHARE}/") or path.endswith("/RECORD")
            data = content.read() if kept else None
            source = content if data is None else io.BytesIO(data)
            seen[path] = File(hashlib.file_digest(source, "sha256").hexdigest(), data)
        elif member.islnk():
            origin = posixpath.normpath(f"/{member.linkname}").lstrip("/")
            seen[path] = seen.get(origin, File("link"))
        elif not member.isdir():
            seen[path] = File(f"link to {member.linkname}")
    return seen


def check(found: Image, context: Context) -> tuple[dict[str, int], list[str]]:
    """Compare an image with itself and the checkout; returns counts, and a line a difference."""
    site = site_of(context.target.python)
    try:
        stated = records(found.files, site)
        note = json.loads(found.share(NOTE))
        profile = json.loads(found.share("profile.json") or b"null")
        wheels = sorted(context.dist.glob("*.whl"))
        count, problems = installed(found.files, stated, context)
        problems += [
            *_labels(found, note, site),
            *_inputs(found, note, context),
            *_programs(found, context),
            *(line for wheel in wheels for line in _against(wheel, stated, site)),
        ]
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        msg = f"{found.name}: a document in it is not in the form that a build writes: {error!r}"
        raise CheckError(msg, "build the image again") from None
    if profile != (context.profile or None):
        problems.append(f"profile.json: differs from the profile of {context.target_name}")
    return {"installed files": count, "wheels in dist": len(wheels)}, problems


# -- installed files ---------------------------------------------------------------------


def site_of(python: str) -> str:
    """Return the folder of packages in our images for a Python such as 3.11, with a last slash."""
    return f"{VENV}/lib/python{python}/site-packages/"


def records(files: Mapping[str, File], site: str) -> Records:
    """Return the RECORDs of the distributions in a folder of packages."""
    result = {}
    for name, file in files.items():
        below = name.removeprefix(site)
        # one level down: vendored packages (in setuptools) are files, not installed
        if file.data is not None and name != below and re.fullmatch(r"[^/]+/RECORD", below):
            result[below.rpartition("/")[0]] = _rows(file.data, site)
    return result


def _rows(record: bytes, site: str) -> dict[str, str]:
    """Return the paths of a RECORD below the root, with their sha256 in hex, or ""."""
    rows = {}
    for path, stated, *_ in filter(None, csv.reader(record.decode().splitlines())):
        kind, _, value = stated.partition("=")
        sha256 = base64.urlsafe_b64decode(f"{value}==").hex() if kind == "sha256" else ""
        rows[posixpath.normpath(f"/{site}/{path}").lstrip("/")] = sha256
    return rows


def _byte_code(path: str) -> bool:
    """Return whether Python uses a file with its source only, which is checked."""
    return re.search(r"/__pycache__/[^/]+\.pyc$", path) is not None


def installed(files: Mapping[str, File], of: Records, context: Context) -> tuple[int, list[str]]:
    """Compare every file of the environment with RECORDs or wheels; as ``check``."""
    site = site_of(context.target.python)
    stated: dict[str, dict[str, str]] = {}  # hashes of a path, by distribution
    for folder, rows in of.items():
        for path, sha256 in rows.items():
            # a wheel's byte code is compiled again, with the hash of its source
            if not _byte_code(path):
                stated.setdefault(path, {})[folder] = sha256
    problems = []
    for path, hashes in stated.items():
        folder, found = next(iter(hashes)), files.get(path, _GONE).sha256
        # a RECORD has no hash of itself, and may lack others of its own folder; of a file in two
        # packages the later one's stays
        free = ".dist-info/" in path and not all(hashes.values())
        if free or found in hashes.values():
            continue
        if found != _in_the_wheel(context, folder, path.removeprefix(site)):
            problems.append(f"{path}: missing, or differs from {folder}/RECORD")
    own = of_the_venv(context.target.python)
    for path, sha256 in own.items():
        if files.get(path, _GONE).sha256 != sha256:
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


def _in_the_wheel(context: Context, folder: str, member: str) -> str:
    """Return the sha256 of a file in the locked wheel; "": not in the store.

    Some wheels have another wheel's RECORD (PyNvVideoCodec 2.0.4 for arm64). Their installed files
    are correct anyway, as the wheel's hash in the lock proves.
    """
    name = canonicalize_name(folder.partition("-")[0])
    locked = (item.sha256s for item in read_lock(context.lock) if item.name == name)
    for sha256 in chain.from_iterable(locked):
        for wheel in context.store.download_path(sha256, "").glob("*.whl"):
            if context.store.verified(sha256, wheel.name):
                with ZipFile(wheel) as opened:
                    # for another platform or Python if it has no such file
                    if {member, f"{folder}/RECORD"} <= set(opened.namelist()):
                        return hashlib.sha256(opened.read(member)).hexdigest()
    return ""


def _against(wheel: Path, of: Records, site: str) -> Iterator[str]:
    """Compare a wheel of ours in dist/ with the installed one, if that is of the same release."""
    with ZipFile(wheel) as opened:
        record = next(n for n in opened.namelist() if n.endswith(".dist-info/RECORD"))
        rows = _rows(opened.read(record), site)
    there = of.get(record.rpartition("/")[0], rows)
    for name, stated in rows.items():
        # installers move the members of .data/, and compile byte code again
        if stated and ".data/" not in name and not _byte_code(name) and there.get(name) != stated:
            yield f"{name}: differs from {wheel}"


# -- labels and documents ----------------------------------------------------------------


def _labels(found: Image, note: Mapping[str, Any], site: str) -> Iterator[str]:
    """Compare the image's labels with its own documents."""
    stated = {**note["image"]["labels"], image.KEY_LABEL: key_of(note["image"])}
    stated[image.SBOM_LABEL] = hashlib.sha256(found.share(SBOM)).hexdigest()
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
    """Compare our programs in the image with the checkout's."""
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
