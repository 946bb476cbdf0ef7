"""What a new release needs, compared with pins.yaml and the locks.

Its wheels declare a torch, a FlashInfer and more. All of this is read, not run.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkforge.core.errors import FetchError, UsageError
from sparkforge.core.index import address_of
from sparkforge.maintain import releases
from sparkforge.maintain.releases import Note
from sparkforge.pins.pins import ReleaseFile, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import lint
from sparkforge.series.series import Series
from sparkforge.sources import sources, wheelhouse
from sparkforge.sources.project import Project
from sparkforge.wheels.archive import UNREADABLE


def find(project: Project, name: str, release: Upstream) -> list[Note]:
    """Return what the locks and pins.yaml have and a new release does not want."""
    notes: dict[Note, None] = {}
    try:
        for lock, one, up, has, met in _needs(project, name, release):
            wanted = one.specifier or "any"
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


def wheels_of(
    project: Project, name: str, release: Upstream
) -> Iterator[tuple[Target, Platform, str]]:
    """Yield the new wheels of a release that targets install, by their key in ``files``."""
    for plan in project.pins.targets.values():
        for platform in plan.platforms if name in plan.wheels else ():
            key = plan.wheels[name].files[platform]
            # else the index lacks the new release's file: reported elsewhere
            if release.files[key] != project.pins.upstreams[name].files[key]:
                yield plan, platform, key


def declared(project: Project, file: ReleaseFile) -> list[Requirement]:
    """Return what a wheel declares; FetchError: its METADATA can be neither fetched nor read.

    Where the index has METADATA apart from the wheel (PEP 658), the wheel is not fetched. No
    sha256 checks it then: it serves to warn and to propose, never to build.
    """
    import requests

    access, here = project.access, project.store.download_path(file.sha256, file.file)
    try:
        text = None
        if not here.is_file() and not access.offline:
            links = access.index.links(file.project)
            apart = next((one.dist_info_link for one in links if one.filename == file.file), None)
            if apart is not None:
                reply = requests.get(address_of(apart), timeout=60)
                reply.raise_for_status()
                text = reply.content
        if text is None:
            path = sources.fetch_release_file(project.store, file, access)
            with zipfile.ZipFile(path) as wheel:
                names = wheel.namelist()
                (member,) = (one for one in names if one.endswith(".dist-info/METADATA"))
                text = wheel.read(member)
        lines = BytesHeaderParser().parsebytes(text).get_all("Requires-Dist") or []
        return [Requirement(str(line)) for line in lines]
    except (requests.RequestException, InvalidRequirement, *UNREADABLE) as error:
        msg = f"{file.file}: cannot read its METADATA: {type(error).__name__}: {error}"
        raise FetchError(msg, "try again, or with another index") from error


def read(line: str) -> Requirement | None:
    """Return the requirement of a line; None: a comment, an option, or empty."""
    try:
        return Requirement(re.split(r"\s#", line)[0].strip())
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
) -> Iterator[tuple[str, Requirement, str | None, str | None, bool]]:
    """Yield what the new wheels require, without what we drop.

    With the lock, our upstream if it is one, the version in the lock or of our wheel, and whether
    that meets it.
    """
    upstreams = project.pins.upstreams
    for plan, platform, key in wheels_of(project, name, release):
        ours = {
            str(canonicalize_name(upstreams[up].files[wheel.files[platform]].project)): up
            for up, wheel in plan.wheels.items()
            if up != name
        }
        dropped = {*map(canonicalize_name, plan.wheels[name].drop_requires)}
        lock, env = plan.requirements[platform], wheelhouse.markers(plan.python, platform)
        have = {one.name: one.version for one in wheelhouse.read_lock(project.root / lock)}
        for one in declared(project, release.files[key]):
            package = name_of(one)
            up = ours.get(package)
            has = have.get(package) if up is None else upstreams[up].version
            met = has is not None and one.specifier.contains(has, prereleases=True)
            applies = one.marker is None or one.marker.evaluate(env)
            if applies and (up is not None or package not in dropped):
                yield lock, one, up, has, met


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
