"""The versions of our other upstreams that a new release demands, read from METADATA.

A wheel names them itself, as vLLM does FlashInfer, or a package that it pins does, as torch does
Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from sparkforge.core.errors import UsageError
from sparkforge.maintain.rebase import drift, metadata, release_spec
from sparkforge.pins.pins import Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.sources.project import Project


@dataclass(frozen=True)
class Demand:
    """What one wheel demands of an upstream."""

    upstream: str
    specifier: SpecifierSet
    by: str
    """The wheel's package and version."""


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


def of_release(project: Project, name: str, release: Upstream) -> list[Demand]:
    """Return what the wheels of a new release demand of the other upstreams of their targets.

    Raises:
        FetchError: METADATA of a wheel cannot be read.
    """
    found: list[Demand] = []
    for plan, platform, key in moved_wheels(project, name, release):
        ours: dict[str, str] = {}
        for up, wheel in plan.wheels.items():
            if up != name:
                file = project.pins.upstreams[up].files[wheel.files[platform]]
                ours[canonicalize_name(file.project)] = up
        asked = metadata.declared(project, release.files[key])
        asked = metadata.applying(asked, plan.python, platform)
        direct = _named(ours, asked, f"{name} {release.version}")
        found += direct
        left = {own: up for own, up in ours.items() if up not in {one.upstream for one in direct}}
        # only what changes: what is locked has been found to agree
        lock = project.root / plan.requirements[platform]
        locked = drift.exact(lock.read_text(encoding="utf-8"))
        for one in asked if left else ():
            package, version = canonicalize_name(one.name), exactly(one.specifier)
            same = one.specifier.contains(locked.get(package, "0"))
            if version is not None and package not in ours and not same:
                theirs = metadata.of_package(one.name, version, plan.python, platform, project)
                found += _named(left, theirs, f"{one.name} {version}")
    return list(dict.fromkeys(found))


def _named(ours: dict[str, str], asked: list[Requirement], by: str) -> list[Demand]:
    named = ((ours.get(canonicalize_name(one.name)), one.specifier) for one in asked)
    return [Demand(up, specifier, by) for up, specifier in named if up is not None]


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
        wanted = SpecifierSet(",".join(str(demand.specifier) for demand in mine))
        pinned = project.pins.upstreams[up]
        if wanted.contains(pinned.version, prereleases=True):
            continue
        known = [exactly(wanted), *release_spec.newest(project.access, pinned, count=50)]
        fits = [one for one in known if one and wanted.contains(one, prereleases=True)]
        if not fits:
            by = ", ".join(f"{demand.by} wants {demand.specifier}" for demand in mine)
            msg = f"{up}: no release on the index meets {wanted}: {by}"
            raise UsageError(msg, f"pin it by hand: build.py rebase {up} --onto release:VERSION")
        found[up] = fits[0]
    return found
