"""The releases of an upstream: ``0.32.0`` → the pin as pins.yaml would have it, and what it needs.

The package index lists a release's files with sha256 and size. The file that replaces the commit
is fetched and checked; a build checks the others when it fetches them. Its wheels declare a torch,
a FlashInfer and more. All of this is read, not run.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pydantic import PlainSerializer

from sparkforge.core import git
from sparkforge.core.errors import FetchError, UsageError
from sparkforge.core.index import address_of, sha256_of
from sparkforge.pins.pins import RELEASE_PLAN, External, ReleaseFile, Target, Upstream
from sparkforge.pins.types import Platform
from sparkforge.series import series
from sparkforge.sources import download, sources, wheelhouse
from sparkforge.sources.project import Project
from sparkforge.sources.sources import UNREADABLE, Access, Source

if TYPE_CHECKING:
    from unearth.link import Link

_STATED = re.compile(
    r"""(?:commit_id|git_version|__git_commit__)\w*\s*=[^'"\n]*['"]g?([0-9a-f]{7,40})['"]"""
)
_MACHINE = re.compile(r"(x86_64|aarch64|any)$")
_SHAS = re.compile(r"^-.*\b([0-9a-f]{40})\b.*\n\+.*\b([0-9a-f]{40})\b", re.MULTILINE)
_FETCHES = re.compile(r"^\+\s*(.*(?:GIT_TAG|GIT_REPOSITORY|set\s*\(\w*TAG\b).*)$", re.MULTILINE)


Note = tuple[str, str]
"""One thing that is unknown or no longer agrees, and the edit that mends it."""


class Verdict(StrEnum):
    """The verdict on a patch; each patch gets exactly one (docs/rebase.md says what they mean)."""

    CLEAN = "clean"
    CONTEXT_ONLY = "context-only"
    CHANGED = "changed"
    UPSTREAMED = "upstreamed"
    CONFLICT = "conflict"
    TARGET_RENAMED = "target-renamed"
    TARGET_DELETED = "target-deleted"


@dataclass(frozen=True)
class PatchResult:
    """The result of one patch."""

    patch: str
    verdict: Verdict
    stops: bool = False
    """A person must resolve it (or skip it)."""
    detail: tuple[str, ...] = ()
    """Findings for people, as lines."""
    files: tuple[str, ...] = ()
    """In conflict."""
    commit: str | None = None
    """The moved commit; None where there is none (stopped, dropped, skipped)."""
    answer: str = ""
    """``resolved by hand``, ``dropped by hand``, ``remembered``, or nothing."""

    def row(self) -> tuple[str, str]:
        """Return it as a row of a table."""
        shown = f"{'! ' if self.stops else ''}{self.verdict}"
        shown += f" ({self.answer})" if self.answer else ""
        return self.patch.removesuffix(".patch"), shown


# without defaults, which need not be values that pins.yaml may have
_Pin = Annotated[
    Upstream, PlainSerializer(lambda pin: pin.model_dump(mode="json", exclude_defaults=True))
]


@dataclass
class Move:
    """One series on its way to another release."""

    upstream: str
    series: str
    """Its digest when the move began."""
    pinned: str
    """The pinned tag when the move began."""
    target: _Pin
    """The upstream as pins.yaml will have it; its commit is None if unknown."""
    old: Source
    new: Source
    notes: tuple[Note, ...] = ()
    """What is unknown of the release."""
    stops: dict[str, PatchResult] = field(default_factory=dict)
    """The patches that did not merge by themselves, by name, and their answers."""


def move_to(project: Project, name: str, target: Upstream) -> Move:
    """Bring both sources of a move into the store; IntegrityError: the series is not its record."""
    pinned, own = project.pins.upstream(name), series.read(project.series_folder(name))
    access = replace(project.access, mirrors={})  # release files on both sides
    new, old = (
        sources.ensure(project.store, name, pin, RELEASE_PLAN, access) for pin in (target, pinned)
    )
    series.apply_recorded(project.store, own, old, pinned)
    return Move(name, own.sha256, pinned.tag, target, old, new)


def listed(access: Access, package: str) -> dict[Version, list[Link]]:
    """Return the files of every version of a package on the index, withdrawn ones, too."""
    if access.offline:
        msg = f"{package}: --offline is set, so the package index cannot be read"
        raise FetchError(msg, "run without --offline")
    found: dict[Version, list[Link]] = {}
    for link in access.index.links(package, all_answer=True):
        if (version := version_of(link.filename)) is not None:
            found.setdefault(version, []).append(link)
    return found


def version_of(file: str) -> Version | None:
    """Return the version in a release file's name; None if it has none."""
    parse = parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename
    try:
        return parse(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def resolve(project: Project, name: str, onto: str) -> Move:
    """Find a release (a version or its tag) on the index, and bring its source into the store."""
    access, pinned = project.access, project.pins.upstream(name)
    v = "v" if pinned.tag.startswith("v") else ""
    version = version_of(f"{name}-{onto.removeprefix('v')}.tar.gz")
    if version is None:
        raise UsageError(f"--onto {onto}: not a version", "for example --onto 0.34.0")
    source = _entry(access, _source_file(pinned), version)
    files = {**pinned.files, str(pinned.source_file): source}
    values: dict[str, object] = {"patched": {}, "files": files}
    if not pinned.source_in:  # what a release contains need not have a version of its own
        values |= {"version": str(version), "tag": f"{v}{version}", "commit": None}
    move = move_to(project, name, pinned.model_copy(update=values))
    externals, notes = _externals(move)
    for key, like in pinned.files.items():
        try:
            if files[key] == like:
                files[key] = _entry(access, like, version)
        except (FetchError, UsageError) as error:
            what = f"files.{key}: {error.what}; {like.file} stays"
            notes.append((what, f"add it to upstreams.{name}.files.{key} when it is published"))
    commit = _stated_commit(move.new)
    if commit is None or len(commit) < 40:
        what = f"upstreams.{name}: the commit of {move.target.tag} is unknown; it states {commit}"
        notes.append((what, sources.how_to_pin(move.target)))
        commit = None
    values |= {"files": files, "externals": externals, "commit": commit}
    move.target, move.notes = pinned.model_copy(update=values), tuple(notes)
    return move


def _source_file(upstream: Upstream) -> ReleaseFile:
    if upstream.source_file is None:
        msg = "it has no release file to use instead of its git commit"
        raise UsageError(msg, "add a source_file in pins.yaml")
    return upstream.files[upstream.source_file]


def _pick(like: ReleaseFile, version: Version, links: list[Link]) -> Link | None:
    """Return the file of a release that corresponds to a pinned one.

    The same name but for the version; else a wheel for the same machine and interpreter (an abi3
    one serves it, too).
    """
    kept = {link.filename: link for link in links if link.yank_reason is None}
    same = like.file.replace(str(version_of(like.file)), str(version), 1)
    if same in kept or not like.is_wheel:
        sdists = (link for name, link in kept.items() if name.endswith(".tar.gz"))
        return kept.get(same) or next(sdists, None)

    def places(file: str) -> set[tuple[str, ...]]:
        tags = (tag for tag in parse_wheel_filename(file)[3] if not tag.abi.endswith("t"))
        return {(tag.interpreter, *_MACHINE.findall(tag.platform)) for tag in tags}

    wheels = (name for name in sorted(kept) if name.endswith(".whl"))
    return next((kept[name] for name in wheels if places(name) & places(like.file)), None)


def _entry(access: Access, like: ReleaseFile, version: Version) -> ReleaseFile:
    """Return the file of a release that corresponds to a pinned one, as pins.yaml has it."""
    every = listed(access, like.project)
    link = _pick(like, version, every.get(version, []))
    if link is None:
        msg = f"{like.project} {version}: the package index has no such release with that file"
        raise UsageError(msg, f"its newest: {', '.join(map(str, sorted(every)[:-7:-1]))}")
    digest = sha256_of(link)
    if digest is None:
        msg = f"{link.filename}: the package index gives no sha256 for it"
        raise FetchError(msg, "use an index with hashes (pip config list)")
    size = download.size_of(str(link.normalized), link.filename)
    fresh = {"file": link.filename, "sha256": digest, "size": size, "natives": None}
    return like.model_copy(update=fresh)


def _stated_commit(source: Source) -> str | None:
    """Return the commit that a release says it was made from, maybe abbreviated."""
    names = ("_version.py", "_build_meta.py")
    where = [f":(glob){folder}{name}" for name in names for folder in ("", "*/")]
    _, text = git.attempt(source.repo, "grep", "-h", "-e", "", source.commit, "--", *where)
    found = _STATED.search(text)
    return found[1] if found else None


def _externals(move: Move) -> tuple[dict[str, External], list[Note]]:
    """Return the externals with the full SHAs that CMake fetches now, and other such lines."""
    words = ("diff", "-U0", "--no-ext-diff", move.old.commit, move.new.commit, "--")
    diff = git.git(move.new.repo, *words, "CMakeLists.txt", "cmake")
    shas = dict(_SHAS.findall(diff))
    fresh = {
        key: one if one.tag else one.model_copy(update={"commit": shas.get(one.commit, one.commit)})
        for key, one in move.target.externals.items()
    }
    done = {one.commit for one in fresh.values()}
    hint = f"compare externals of upstreams.{move.upstream}, and what it contains, in pins.yaml"
    lines = (line for line in _FETCHES.findall(diff) if not any(sha in line for sha in done))
    return fresh, [(f"CMake: {line}", hint) for line in lines]


def find(
    project: Project, name: str, release: Upstream, moved: Mapping[str, Upstream] = {}
) -> list[Note]:
    """Return what locks, pins.yaml and moved upstreams have and a new release does not want."""
    notes: dict[Note, None] = {}
    try:
        for lock, one, up, has in _unmet(project, name, release, moved):
            wanted = one.specifier or "any"
            if up is not None:
                what = f"{one.name}: {name} wants {wanted}, upstreams.{up} is {has}"
                hint = f"build.py rebase {up} --onto {exactly(one.specifier) or 'VERSION'}"
            else:
                what = f"{lock} has {name_of(one)} {has or '(none)'}: {name} wants {wanted}"
                hint = f"change the .in file and run scripts/lock.sh {Path(lock).name}"
            notes[what, hint] = None
    except FetchError as error:
        notes[error.what, "compare its METADATA with the locks before a build"] = None
    return list(notes)


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
        return [Requirement(line) for line in parse_email(text)[0].get("requires_dist", [])]
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


def _unmet(
    project: Project, name: str, release: Upstream, moved: Mapping[str, Upstream]
) -> Iterator[tuple[str, Requirement, str | None, str | None]]:
    """Yield what the new wheels require and we do not have, without what we drop.

    With the lock, our upstream if it is one, and the version in the lock or of our wheel.
    """
    upstreams = project.pins.upstreams
    for plan, platform, key in wheels_of(project, name, release):
        ours = {
            str(canonicalize_name(upstreams[up].files[wheel.files[platform]].project)): up
            for up, wheel in plan.wheels.items()
            if up != name
        }
        dropped = {*map(canonicalize_name, plan.wheels[name].drop_requires)} - ours.keys()
        lock, env = plan.requirements[platform], wheelhouse.markers(plan.python, platform)
        have = {one.name: one.version for one in wheelhouse.read_lock(project.root / lock)}
        have |= {package: {**upstreams, **moved}[up].version for package, up in ours.items()}
        for one in declared(project, release.files[key]):
            package = name_of(one)
            has = have.get(package)
            met = has is not None and one.specifier.contains(has, prereleases=True)
            applies = one.marker is None or one.marker.evaluate(env)
            if applies and not met and package not in dropped:
                yield lock, one, ours.get(package), has


def moves(project: Project, name: str, release: Upstream) -> dict[str, str]:
    """Return our other upstreams that a release's wheels need in another version, and which."""
    asked: dict[str, SpecifierSet] = {}
    for _, one, up, _ in _unmet(project, name, release, {}):
        if up is not None:
            asked[up] = asked.get(up, SpecifierSet()) & one.specifier
    found = {}
    for upstream, wanted in asked.items():
        file = _source_file(project.pins.upstreams[upstream])
        every = listed(project.access, file.project).items()
        finals = [v for v, links in every if not v.is_prerelease and _pick(file, v, links)]
        known = [exactly(wanted), *map(str, sorted(finals, reverse=True))]
        fits = [one for one in known if one and wanted.contains(one, prereleases=True)]
        if not fits:
            msg = f"{upstream}: no release on the index meets {wanted}"
            raise UsageError(msg, f"move it first: build.py rebase {upstream} --onto RELEASE")
        found[upstream] = fits[0]
    return found
