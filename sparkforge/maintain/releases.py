"""The releases of an upstream: ``release:0.32.0`` → the pin as pins.yaml would have it.

The package index lists a release's files with sha256 and size. The file that replaces the commit
is fetched and checked; a build checks the others when it fetches them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from sparkforge.core import git
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import CommandError, FetchError, IntegrityError, UsageError
from sparkforge.core.index import sha256_of
from sparkforge.pins.pins import RELEASE_PLAN, ReleaseFile, SourcePlan, Upstream
from sparkforge.sources import download, sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access, Source

if TYPE_CHECKING:
    from unearth.link import Link

_STATED = re.compile(
    r"""(?:commit_id|git_version|__git_commit__)\w*\s*=[^'"\n]*['"]g?([0-9a-f]{7,40})['"]"""
)
_TAG = re.compile(r"v?\d+(\.\d+)*(\.?[a-z]+\d+)?")
_SHAS = re.compile(r"^-.*\b([0-9a-f]{40})\b.*\n\+.*\b([0-9a-f]{40})\b", re.MULTILINE)
_FETCHES = re.compile(r"^\+\s*(.*(?:GIT_TAG|GIT_REPOSITORY|set\s*\(\w*TAG\b).*)$", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """A release to move to."""

    upstream: Upstream
    """As pins.yaml would have it; its commit is None if unknown."""
    source: Source
    old: Source
    """The pinned source, of the same kind if possible."""
    notes: tuple[tuple[str, str], ...] = ()
    """What is unknown of it, each with a hint."""


def listed(access: Access, package: str) -> dict[Version, list[Link]]:
    """Return the files of every version of a package on the index, withdrawn ones, too."""
    if access.offline:
        msg = f"{package}: --offline is set, so the package index cannot be read"
        raise FetchError(msg, "run without --offline, or give a file: release:FILE")
    found: dict[Version, list[Link]] = {}
    for link in access.index.links(package, all_answer=True):
        if (version := version_of(link.filename)) is not None:
            found.setdefault(version, []).append(link)
    return found


def finals(access: Access, upstream: Upstream) -> list[str]:
    """Return the final releases on the index, newest first; of post releases the last."""
    file = _source_file(upstream)
    found: dict[tuple[int, ...], Version] = {}
    for version, links in sorted(listed(access, file.project).items()):
        if not version.is_prerelease and _pick(file, version, links):
            found[version.release] = version
    if not found:
        msg = f"{file.project}: the package index has no release of it"
        raise FetchError(msg, "check pip's configuration (pip config list)")
    return [str(version) for version in sorted(found.values(), reverse=True)]


def version_of(file: str) -> Version | None:
    """Return the version in a release file's name; None if it has none."""
    try:
        if file.endswith(".whl"):
            return parse_wheel_filename(file)[1]
        return parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def resolve(
    project: Project, name: str, spec: str, *, complete: bool = False, commit: str | None = None
) -> Release:
    """Find a release and bring its source into the store.

    Args:
        spec: ``release:VERSION``, ``release:FILE``, ``latest``, a tag, or a full commit SHA.
        complete: also find the commit and all of the upstream's files, for pins.yaml.
        commit: that the release was built from, where a person knows it.
    """
    access, pinned = project.access, project.pins.upstream(name)
    if spec == "latest":
        spec = f"release:{finals(access, pinned)[0]}"
    plan: SourcePlan
    old_plan: SourcePlan
    if spec.startswith("release:"):
        fresh, version = _released(project, pinned, spec.removeprefix("release:"))
        plan = old_plan = RELEASE_PLAN
        local, but = replace(access, mirrors={}), pinned.source_file  # a mirror is a repository
    else:
        fresh = _tagged(access, name, pinned, spec)
        version, local, but = Version(fresh.version), access, None
        plan, old_plan = "git", "auto"
    source = sources.ensure(project.store, name, fresh, plan, local)
    old = sources.ensure(project.store, name, pinned, old_plan, local)
    if not complete:
        return Release(fresh, source, old)
    fresh, notes = _externals(fresh, source, old)
    files = dict(fresh.files)
    for key, like in pinned.files.items():
        try:
            if key != but:
                files[key] = _entry(access, like, version)
        except (FetchError, UsageError) as error:
            what = f"files.{key}: {error.what}; {like.file} stays"
            notes.append((what, f"add it to upstreams.{name}.files.{key} when it is published"))
    stated = None if but is None else _stated_commit(source)
    found = commit or fresh.commit or (stated if stated and len(stated) == 40 else None)
    if found is None:
        what = f"upstreams.{name}: the commit of {fresh.tag} is unknown; it states {stated}"
        notes.append((what, f"with git access: build.py pins resolve {name}; or --commit SHA"))
    elif stated is not None and not found.startswith(stated):
        msg = f"{fresh.tag}: commit {found}, but the release states {stated}"
        raise IntegrityError(msg, "give the commit that the release was built from: --commit SHA")
    return Release(
        fresh.model_copy(update={"files": files, "commit": found}), source, old, tuple(notes)
    )


def _source_file(upstream: Upstream) -> ReleaseFile:
    if upstream.source_file is None:
        msg = "it has no release file to use instead of its git commit"
        raise UsageError(msg, "give a tag or a commit, or add a source_file in pins.yaml")
    return upstream.files[upstream.source_file]


def _released(project: Project, pinned: Upstream, where: str) -> tuple[Upstream, Version]:
    """Return the pin of a version on the index, or of a file on disk, with its source file."""
    like, path = _source_file(pinned), Path(where).expanduser()
    try:
        version = version_of(path.name) if path.is_file() else Version(where)
    except InvalidVersion:
        version = None
    if version is None:
        msg = f"release:{where}: neither a version, nor an sdist or wheel on this disk"
        raise UsageError(msg, "for example release:0.32.0")
    if path.is_file():
        digest, size = sha256_file(path), path.stat().st_size
        download.fetch(project.store, name=path.name, sha256=digest, locate=path.resolve().as_uri)
        file = like.model_copy(update={"file": path.name, "sha256": digest, "size": size})
    else:
        file = _entry(project.access, like, version)
    files = {**pinned.files, str(pinned.source_file): file}
    fresh: dict[str, object] = {"files": files, "patched": {}}
    if not pinned.source_in:  # what a release contains need not have a version of its own
        v = "v" if pinned.tag.startswith("v") else ""
        fresh |= {"version": str(version), "tag": f"{v}{version}", "commit": None}
    return pinned.model_copy(update=fresh), version


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
        raise FetchError(msg, "download it and give the file: release:FILE")
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


def _tagged(access: Access, name: str, pinned: Upstream, spec: str) -> Upstream:
    """Return the pin of a release tag in the repository, named by itself or by its commit."""
    url = access.mirrors.get(name, pinned.git)
    local = "://" not in url and Path(url).exists()
    try:
        if access.offline and not local:
            raise CommandError("--offline is set")
        tags = git.remote_tags(str(Path(url).resolve()) if local else url)
    except CommandError as error:
        msg = f"{name}: git could not read {url}:\n{error}"
        raise FetchError(msg, f"check the network, or give --mirror {name}=URL-or-path") from error
    named = [tag for tag, commit in tags.items() if spec in (tag, commit)]
    tag = next((tag for tag in named if _TAG.fullmatch(tag)), None)
    if tag is None:
        msg = f"{name}: {url} has no release tag {spec}, and none that points to it"
        raise UsageError(msg, f"some of its tags: {', '.join(list(tags)[:-7:-1])}")
    version = tag.removeprefix("v")
    fresh = {"tag": tag, "commit": tags[tag], "version": version, "patched": {}}
    return pinned.model_copy(update=fresh)


def _externals(
    release: Upstream, source: Source, old: Source
) -> tuple[Upstream, list[tuple[str, str]]]:
    """Return a pin with the full SHAs that its CMake fetches now, and other such lines."""
    words = ("diff", "-U0", "--no-ext-diff", old.commit, source.commit, "--")
    diff = git.git(source.repo, *words, "CMakeLists.txt", "cmake")
    shas = dict(_SHAS.findall(diff))
    fresh = {
        key: one if one.tag else one.model_copy(update={"commit": shas.get(one.commit, one.commit)})
        for key, one in release.externals.items()
    }
    done = {one.commit for one in fresh.values()}
    hint = f"compare externals of upstreams.{source.upstream}, and what it contains, in pins.yaml"
    lines = (line for line in _FETCHES.findall(diff) if not any(sha in line for sha in done))
    notes = [(f"CMake: {line}", hint) for line in lines]
    return release.model_copy(update={"externals": fresh}), notes
