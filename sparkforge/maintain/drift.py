"""What a new release needs, compared with pins.yaml and the locks.

Its wheels declare a torch, a FlashInfer and more; its CMake names the sources that a compile
fetches. All of this is read, not run.
"""

import io
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkforge.core.errors import FetchError, UsageError
from sparkforge.maintain import releases
from sparkforge.maintain.releases import Note
from sparkforge.pins.pins import ReleaseFile, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import lint
from sparkforge.series.series import Series
from sparkforge.sources import download, wheelhouse
from sparkforge.sources.project import Project
from sparkforge.wheels.archive import UNREADABLE


def find(project: Project, name: str, release: Upstream) -> list[Note]:
    """Return what the locks and pins.yaml have and a new release does not want."""
    notes: dict[Note, None] = {}
    try:
        for wheel, one, up, has, met in _needs(project, name, release):
            wanted, lock = one.specifier or "any", wheel.plan.requirements[wheel.platform]
            if not met and up is not None:
                to = exactly(one.specifier) or "VERSION"
                what = f"{one.name}: {name} wants {wanted}, upstreams.{up} is {has}"
                notes[what, f"build.py rebase {up} --onto {to}"] = None
            elif not met:
                what = f"{lock} has {name_of(one)} {has or '(none)'}: {name} wants {wanted}"
                hint = f"change the .in file and run scripts/lock.sh {Path(lock).name}"
                notes[what, hint] = None
    except FetchError as error:
        notes[error.what, "compare its METADATA with the locks before a build"] = None
    return list(notes)


def droppable(every: Iterable[Series], upstreams: Mapping[str, Upstream]) -> list[Note]:
    """Return the patches whose Drop-when holds for these upstreams."""
    found = []
    versions = {name: pin.version for name, pin in upstreams.items()}
    for own in every:
        for patch in own.patches:
            text = patch.trailers["Drop-when"]
            condition = lint.drop_when(text)
            if condition is not None and condition.holds(versions):
                name = patch.name.removesuffix(".patch")
                hint = f"drop its commit, then build.py patches export DIR --drop {patch.name}"
                found.append((f"{own.upstream}: {name}: its Drop-when holds: {text}", hint))
    return found


# -- requirements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wheel:
    """A wheel of a new release that a target installs, and what it requires there."""

    plan: Target
    platform: Platform
    key: str
    """Of the upstream's ``files``."""
    requires: list[Requirement]
    ours: Mapping[str, str]
    """Our other upstreams with a wheel in the target, by package."""


def wheels_of(project: Project, name: str, release: Upstream) -> Iterator[Wheel]:
    """Yield the new wheels of a release."""
    upstreams = project.pins.upstreams
    for plan in project.pins.targets.values():
        for platform in plan.platforms if name in plan.wheels else ():
            key = plan.wheels[name].files[platform]
            if release.files[key] == upstreams[name].files[key]:
                continue  # the index lacks the new release's file: reported elsewhere
            ours = {
                str(canonicalize_name(upstreams[up].files[wheel.files[platform]].project)): up
                for up, wheel in plan.wheels.items()
                if up != name
            }
            every = applying(declared(project, release.files[key]), plan.python, platform)
            yield Wheel(plan, platform, key, every, ours)


def exact(text: str) -> dict[str, str]:
    """Return the versions that a requirements text pins with ==, by distribution."""
    found = ((name_of(one), exactly(one.specifier)) for one in listed(text))
    return {name: version for name, version in found if version is not None}


def listed(text: str) -> list[Requirement]:
    """Return the requirements of a list or lock, in order."""
    return [one for line in text.splitlines() if (one := read(line)) is not None]


def read(line: str) -> Requirement | None:
    """Return the requirement of a line; None: a comment, an option, or empty."""
    try:
        return Requirement(re.split(r"\s#|\s--hash|\\$", line.strip())[0].strip())
    except InvalidRequirement:
        return None


def exactly(specifier: SpecifierSet) -> str | None:
    """Return the version that a specifier pins with ==; None where it pins none."""
    return next((s.version for s in specifier if s.operator == "==" and "*" not in s.version), None)


def name_of(requirement: Requirement) -> str:
    """Return a requirement's canonical name."""
    return str(canonicalize_name(requirement.name))


def _needs(
    project: Project, name: str, release: Upstream
) -> Iterator[tuple[Wheel, Requirement, str | None, str | None, bool]]:
    """Yield each requirement of the new wheels, the upstream if it is ours, and what is there.

    Yields:
        The wheel, the requirement, our upstream, the version in the lock or of our wheel, and
        whether that meets it.
    """
    for wheel in wheels_of(project, name, release):
        dropped = {*map(canonicalize_name, wheel.plan.wheels[name].drop_requires)}
        path = project.root / wheel.plan.requirements[wheel.platform]
        have = exact(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for one in wheel.requires:
            package = canonicalize_name(one.name)
            up = wheel.ours.get(package)
            has = have.get(package) if up is None else project.pins.upstreams[up].version
            met = has is not None and one.specifier.contains(has, prereleases=True)
            if up is not None or package not in dropped:
                yield wheel, one, up, has, met


def moves(project: Project, name: str, release: Upstream) -> dict[str, str]:
    """Return our other upstreams that a release's wheels need in another version, and which."""
    asked: dict[str, SpecifierSet] = {}
    for _, one, up, _, _ in _needs(project, name, release):
        if up is not None:
            asked[up] = asked.get(up, SpecifierSet()) & one.specifier
    found = {}
    for upstream, wanted in asked.items():
        pinned = project.pins.upstreams[upstream]
        if not wanted.contains(pinned.version, prereleases=True):
            known = [exactly(wanted), *releases.finals(project.access, pinned)]
            fits = [one for one in known if one and wanted.contains(one, prereleases=True)]
            if not fits:
                msg = f"{upstream}: no release on the index meets {wanted}"
                raise UsageError(msg, f"move it first: build.py rebase {upstream} --onto RELEASE")
            found[upstream] = fits[0]
    return found


# -- METADATA of wheels, without fetching the wheel -----------------------------------------------

_TAIL = 4 << 20  # bytes; METADATA is near the end, before vLLM's 600 kB list of members
_TIMEOUT_S = (15, 60)  # to connect, and between two reads


def applying(requirements: list[Requirement], python: str, platform: str) -> list[Requirement]:
    """Return the requirements for a Python (``3.12``) and platform (``linux/arm64``)."""
    env = wheelhouse.markers(python, platform)
    return [one for one in requirements if one.marker is None or one.marker.evaluate(env)]


def declared(project: Project, file: ReleaseFile) -> list[Requirement]:
    """Return what a wheel of a release declares; FetchError if its METADATA cannot be read."""
    here = project.store.download_path(file.sha256, file.file)
    if here.is_file():
        return _declared(here.as_uri(), file.file)
    if project.access.offline:
        raise FetchError(f"{file.file}: not in the store", "run without --offline")
    return _declared(project.access.index.url_of(file.project, file.file), file.file)


def _declared(url: str, name: str) -> list[Requirement]:
    try:
        end = io.BytesIO(_end_of(url, name))
        with zipfile.ZipFile(end) as wheel:  # a list of members is enough to find one at the end
            (path,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
            text = wheel.read(path)
        lines = BytesHeaderParser().parsebytes(text).get_all("Requires-Dist") or []
        return [Requirement(str(line)) for line in lines]
    except (OSError, InvalidRequirement, *UNREADABLE) as error:  # requests' errors are OSErrors
        msg = f"{name}: cannot read its METADATA: {type(error).__name__}: {error}"
        raise FetchError(msg, "use an index that supports range requests") from error


def _end_of(url: str, name: str) -> bytes:
    """Return the end of a file. Its sha256 cannot check that: it serves to warn, never to build."""
    import requests

    first = max(0, download.size_of(url, name) - _TAIL)
    if urlsplit(url).scheme == "file":
        with Path(unquote(urlsplit(url).path)).open("rb") as file:
            file.seek(first)
            return file.read()
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={first}-"}
    # not read at once: a server that ignores the range would send all of it
    with requests.get(url, headers=headers, timeout=_TIMEOUT_S, stream=True) as reply:
        reply.raise_for_status()
        if first and reply.status_code != 206:
            raise ValueError("its server does not support range requests")
        return bytes(reply.raw.read(_TAIL))
