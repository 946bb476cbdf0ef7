"""The releases of an upstream: ``0.32.0`` → the pin as pins.yaml would have it.

The package index lists a release's files with sha256 and size. The file that replaces the commit
is fetched and checked; a build checks the others when it fetches them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pydantic import PlainSerializer

from sparkforge.core import git
from sparkforge.core.errors import CommandError, FetchError, UsageError
from sparkforge.core.index import sha256_of
from sparkforge.maintain.findings import PatchResult
from sparkforge.pins.pins import RELEASE_PLAN, ReleaseFile, SourcePlan, Upstream
from sparkforge.series import series
from sparkforge.sources import download, sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access, Source

if TYPE_CHECKING:
    from unearth.link import Link

_STATED = re.compile(
    r"""(?:commit_id|git_version|__git_commit__)\w*\s*=[^'"\n]*['"]g?([0-9a-f]{7,40})['"]"""
)
_SHAS = re.compile(r"^-.*\b([0-9a-f]{40})\b.*\n\+.*\b([0-9a-f]{40})\b", re.MULTILINE)
_FETCHES = re.compile(r"^\+\s*(.*(?:GIT_TAG|GIT_REPOSITORY|set\s*\(\w*TAG\b).*)$", re.MULTILINE)


Note = tuple[str, str]
"""One thing that is unknown or no longer agrees, and the edit that mends it."""


def _pin(pin: Upstream) -> dict[str, Any]:
    """Return the values that a pin has: a default need not be a value that pins.yaml may have."""
    return pin.model_dump(mode="json", exclude_defaults=True)


@dataclass
class Move:
    """One series on its way to another release."""

    upstream: str
    series: str
    """Its digest when the move began."""
    pinned: str
    """The pinned tag when the move began."""
    target: Annotated[Upstream, PlainSerializer(_pin)]
    """The upstream as pins.yaml will have it; its commit is None if unknown."""
    old: Source
    """The pinned source, of the same kind as the new one if possible."""
    new: Source
    notes: tuple[Note, ...] = ()
    """What is unknown of the release."""
    stops: dict[str, PatchResult] = field(default_factory=dict)
    """The patches that did not merge by themselves, by name, and their answers."""


def move_to(
    project: Project, name: str, target: Upstream, plan: SourcePlan, access: Access
) -> Move:
    """Bring both sources of a move into the store; IntegrityError: the series has changed."""
    pinned, own = project.pins.upstream(name), series.read(project.series_folder(name))
    new, old = (sources.ensure(project.store, name, pin, plan, access) for pin in (target, pinned))
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


def finals(access: Access, upstream: Upstream) -> list[str]:
    """Return the final releases on the index, newest first."""
    file = _source_file(upstream)
    every = listed(access, file.project).items()
    found = [v for v, links in every if not v.is_prerelease and _pick(file, v, links)]
    return [str(version) for version in sorted(found, reverse=True)]


def version_of(file: str) -> Version | None:
    """Return the version in a release file's name; None if it has none."""
    parse = parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename
    try:
        return parse(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def resolve(project: Project, name: str, onto: str, *, complete: bool = False) -> Move:
    """Find a release and bring its source into the store.

    With a mirror of the upstream it is a tag of that repository, else a version on the index.

    Args:
        onto: a version or its tag.
        complete: also find the commit and all of the upstream's files, for pins.yaml.
    """
    access, pinned = project.access, project.pins.upstream(name)
    v = "v" if pinned.tag.startswith("v") else ""
    version = version_of(f"{name}-{onto.removeprefix('v')}.tar.gz")
    if version is None:
        raise UsageError(f"--onto {onto}: not a version", "for example --onto 0.34.0")
    values: dict[str, object] = {"patched": {}}
    if not pinned.source_in:  # what a release contains need not have a version of its own
        values |= {"version": str(version), "tag": f"{v}{version}", "commit": None}
    plan: SourcePlan = "git" if name in access.mirrors else RELEASE_PLAN
    if plan == "git":
        values["commit"] = _tagged(access, name, f"{v}{version}")
    else:
        key, like = str(pinned.source_file), _source_file(pinned)
        values["files"] = {**pinned.files, key: _entry(access, like, version)}
    move = move_to(project, name, pinned.model_copy(update=values), plan, access)
    if not complete:
        return move
    fresh, notes = _externals(move)
    files = dict(fresh.files)
    for key, like in pinned.files.items():
        try:
            if files[key] == like:
                files[key] = _entry(access, like, version)
        except (FetchError, UsageError) as error:
            what = f"files.{key}: {error.what}; {like.file} stays"
            notes.append((what, f"add it to upstreams.{name}.files.{key} when it is published"))
    found = fresh.commit or _stated_commit(move.new)
    if found is None or len(found) < 40:
        what = f"upstreams.{name}: the commit of {fresh.tag} is unknown; it states {found}"
        notes.append((what, f"with git access: build.py pins resolve {name}"))
        found = None
    move.target = fresh.model_copy(update={"files": files, "commit": found})
    move.notes = tuple(notes)
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
    by_name = {link.filename: link for link in links if link.yank_reason is None}
    same = like.file.replace(str(version_of(like.file)), str(version), 1)
    if same in by_name or not like.file.endswith(".whl"):
        sdists = (link for name, link in by_name.items() if name.endswith(".tar.gz"))
        return by_name.get(same) or next(sdists, None)

    def places(file: str) -> set[tuple[str, ...]]:
        tags = (tag for tag in parse_wheel_filename(file)[3] if not tag.abi.endswith("t"))
        machine = re.compile(r"(x86_64|aarch64|any)$")
        return {(tag.interpreter, *machine.findall(tag.platform)) for tag in tags}

    wheels = (name for name in sorted(by_name) if name.endswith(".whl"))
    return next((by_name[name] for name in wheels if places(name) & places(like.file)), None)


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
    listing = git.git(source.repo, "ls-tree", "-r", "--name-only", "-z", source.commit)
    for path in listing.split("\0"):
        if Path(path).name in ("_version.py", "_build_meta.py") and path.count("/") <= 1:
            text = git.git(source.repo, "show", f"{source.commit}:{path}")
            if found := _STATED.search(text):
                return found[1]
    return None


def _tagged(access: Access, name: str, tag: str) -> str:
    """Return the commit of a tag in the upstream's mirror."""
    url = access.mirrors[name]
    try:
        return git.remote_tags(str(Path(url).resolve()) if Path(url).exists() else url)[tag]
    except CommandError as error:
        raise FetchError(f"{name}: git could not read {url}:\n{error}", "see --mirror") from error
    except KeyError:
        raise UsageError(f"{name}: {url} has no tag {tag}", "see its tags") from None


def _externals(move: Move) -> tuple[Upstream, list[Note]]:
    """Return a pin with the full SHAs that its CMake fetches now, and other such lines."""
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
    notes = [(f"CMake: {line}", hint) for line in lines]
    return move.target.model_copy(update={"externals": fresh}), notes
