"""The versions of our other upstreams that a new release demands, read from METADATA.

A wheel names them itself, as vLLM does FlashInfer, or a package that it pins does, as torch does
Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkforge.core.errors import FetchError, UsageError
from sparkforge.maintain.rebase import drift, release_spec, requirements
from sparkforge.pins.pins import ReleaseFile, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Demand:
    """What one wheel demands of an upstream."""

    upstream: str
    specifier: SpecifierSet
    by: str
    """The wheel's package and version."""


def declared(project: Project, file: ReleaseFile) -> list[Requirement]:
    """Return what a wheel of a release declares.

    Raises:
        FetchError: it cannot be read without fetching the wheel.
    """
    found = requirements.declared(project.store, file, project.access)
    if found is None:
        msg = f"{file.file}: its METADATA cannot be read from here"
        raise FetchError(msg, "use an index that supports range requests, or put it in the store")
    return found


def of_release(project: Project, name: str, release: Upstream) -> list[Demand]:
    """Return what the wheels of a new release demand of the other upstreams of their targets.

    Raises:
        FetchError: METADATA of a wheel cannot be read.
    """
    found: list[Demand] = []
    for plan, platform, key in moved_wheels(project, name, release):
        asked = declared(project, release.files[key])
        asked = requirements.applying(asked, plan.python, platform)
        found += _of_wheel(project, plan, platform, name, asked, f"{name} {release.version}")
    return list(dict.fromkeys(found))


def moved_wheels(
    project: Project, name: str, release: Upstream
) -> Iterator[tuple[Target, Platform, str]]:
    """Yield each target and platform for which a release has another wheel, and the file's key."""
    pinned = project.pins.upstreams[name]
    for plan in project.pins.targets.values():
        for platform in plan.platforms if name in plan.wheels else ():
            key = plan.wheels[name].files[platform]
            if release.files[key] != pinned.files[key]:
                yield plan, platform, key


def _of_wheel(
    project: Project,
    plan: Target,
    platform: Platform,
    name: str,
    asked: list[Requirement],
    by: str,
) -> Iterator[Demand]:
    ours: dict[str, str] = {}
    for up, wheel in plan.wheels.items():
        if up != name:
            file = project.pins.upstreams[up].files[wheel.files[platform]]
            ours[canonicalize_name(file.project)] = up
    direct = list(_named(ours, asked, by))
    yield from direct
    left = {own: up for own, up in ours.items() if up not in {one.upstream for one in direct}}
    if not left:
        return
    # only what changes: what is locked has been found to agree
    lock = project.root / plan.requirements[platform]
    locked = drift.exact(lock.read_text(encoding="utf-8"))
    for one in asked:
        package = canonicalize_name(one.name)
        version = exactly(one.specifier)
        if version is None or package in ours or one.specifier.contains(locked.get(package, "0")):
            continue
        theirs = requirements.of_package(one.name, version, plan.python, platform, project.access)
        yield from _named(left, theirs, f"{one.name} {version}")


def _named(ours: Mapping[str, str], asked: list[Requirement], by: str) -> Iterator[Demand]:
    for one in asked:
        if (up := ours.get(canonicalize_name(one.name))) is not None:
            yield Demand(up, one.specifier, by)


def exactly(specifier: SpecifierSet) -> str | None:
    """Return the version that a specifier pins with ==; None where it pins none."""
    return next(
        (one.version for one in specifier if one.operator == "==" and "*" not in one.version), None
    )


def moves(project: Project, demands: list[Demand]) -> dict[str, str]:
    """Return the version to move each upstream to whose pinned one is not what is demanded.

    Raises:
        UsageError: no release meets all demands.
        FetchError: the index does not answer.
    """
    found = {}
    for up in dict.fromkeys(demand.upstream for demand in demands):
        mine = [demand for demand in demands if demand.upstream == up]
        wanted = SpecifierSet()
        for demand in mine:
            wanted &= demand.specifier
        if wanted.contains(project.pins.upstreams[up].version, prereleases=True):
            continue
        found[up] = _best(project, up, wanted, mine)
    return found


def _best(project: Project, up: str, wanted: SpecifierSet, mine: list[Demand]) -> str:
    version = exactly(wanted)
    if version is not None and wanted.contains(version, prereleases=True):
        return version
    for version in release_spec.newest(project.access, project.pins.upstreams[up], count=50):
        if wanted.contains(version):
            return version
    by = ", ".join(f"{demand.by} wants {demand.specifier}" for demand in mine)
    msg = f"{up}: no release on the index meets {wanted}: {by}"
    raise UsageError(msg, f"pin it by hand: build.py rebase {up} --onto release:VERSION")
