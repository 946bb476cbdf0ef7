"""The goal of a rebase: words like ``release:0.32.0`` → the upstream as pins.yaml would pin it.

The package index lists a release's files with sha256 and size. The file that replaces the commit
is fetched and checked; a build checks the others when it fetches them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
from sparkforge.core.log import log
from sparkforge.pins.pins import RELEASE_PLAN, ReleaseFile, SourcePlan, Upstream
from sparkforge.pins.types import padded
from sparkforge.sources import download, sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access, Source

if TYPE_CHECKING:
    from unearth.link import Link

_GIT: SourcePlan = "git"
_GIT_OR_RELEASE: SourcePlan = "auto"
_STATED = re.compile(
    r"""(?:commit_id|git_version|__git_commit__)\w*\s*=[^'"\n]*['"]g?([0-9a-f]{7,40})['"]"""
)


@dataclass(frozen=True)
class Release:
    """A release to move to."""

    upstream: Upstream
    """As pins.yaml would have it; its commit is None if unknown."""
    source: Source
    lacking: tuple[str, ...] = ()
    """Names in ``files`` for which the index has no file of this release."""
    declared_commit: str | None = None
    """The commit that the release itself names, maybe abbreviated."""


def resolve(project: Project, name: str, spec: str, *, complete: bool = False) -> Release:
    """Find a release and bring its source into the store.

    Args:
        spec: ``release:VERSION``, ``release:FILE``, ``latest``, a tag, or a full commit SHA.
        complete: also find the commit and all of the upstream's files, for pins.yaml.

    Raises:
        UsageError: no such release or tag.
        FetchError: the index or repository does not answer, or ``--offline`` forbids it.
        IntegrityError: a file differs from the index.
    """
    access, upstream = project.access, project.pins.upstream(name)
    if spec == "latest":
        spec = f"release:{newest(access, upstream)[0]}"
    if spec.startswith("release:"):
        release = _release(project, name, upstream, spec.removeprefix("release:"))
    else:
        release = _tag_or_sha(project, name, upstream, spec)
    if not complete:
        return release
    fresh = release.upstream
    but = None if release.source.provider == "git" else upstream.source_file
    version = version_of(fresh.files[but].file) if but else Version(fresh.version)
    assert version is not None
    files = _other_files(upstream, version, access, but)
    commit = fresh.commit or _commit_of(name, fresh, release.declared_commit, access)
    fresh = fresh.model_copy(update={"files": {**fresh.files, **files}, "commit": commit})
    lacking = tuple(key for key in upstream.files if key not in files and key != but)
    return replace(release, upstream=fresh, lacking=lacking)


def old_source(project: Project, name: str, release: Release) -> Source:
    """Return the pinned source, of the same kind as the new one if possible."""
    store, access, upstream = project.store, project.access, project.pins.upstream(name)
    if release.source.provider == "release":
        return sources.ensure(store, name, upstream, RELEASE_PLAN, replace(access, mirrors={}))
    return sources.ensure(store, name, upstream, _GIT_OR_RELEASE, access)


# -- releases on the index -------------------------------------------------------------


def versions(access: Access, package: str) -> dict[Version, str | None]:
    """Return all versions of a package on the index, each with why upstream withdrew it.

    Raises:
        FetchError: the index does not answer, or ``--offline`` forbids it.
    """
    _check_online(access, package)
    found: dict[Version, str | None] = {}
    for link in access.index.links(package, all_answer=True):
        if (version := version_of(link.filename)) is not None:
            # a release is withdrawn when all of its files are
            yanked = link.yank_reason
            reason = None if yanked is None else str(yanked) or "no reason given"
            found[version] = reason if found.get(version, reason) is not None else None
    return found


def newest(access: Access, upstream: Upstream, count: int = 1) -> list[str]:
    """Return the newest final releases on the index, newest first; of post releases the last.

    Raises:
        FetchError: the index does not answer, or ``--offline`` forbids it.
    """
    file = upstream.files[_source_file(upstream)]
    finals: dict[tuple[int, ...], Version] = {}
    for version, links in _listed(access, file.project).items():
        if not version.is_prerelease and _pick(file, version, links):
            finals[version.release] = max(version, finals.get(version.release, version))
    if not finals:
        msg = f"{file.project}: the package index has no release of it"
        raise FetchError(msg, "check pip's configuration (pip config list)")
    return [str(version) for version in sorted(finals.values(), reverse=True)[:count]]


def _source_file(upstream: Upstream) -> str:
    if upstream.source_file is None:
        msg = "it has no release file to use instead of its git commit"
        raise UsageError(msg, "give a tag or a commit, or add a source_file in pins.yaml")
    return upstream.source_file


def _check_online(access: Access, package: str) -> None:
    if access.offline:
        msg = f"{package}: --offline is set, so the package index cannot be read"
        raise FetchError(msg, "run without --offline, or give a file: release:FILE")


def _listed(access: Access, package: str) -> dict[Version, list[Link]]:
    _check_online(access, package)
    releases: dict[Version, list[Link]] = {}
    for link in access.index.links(package):
        if link.yank_reason is None and (version := version_of(link.filename)) is not None:
            releases.setdefault(version, []).append(link)
    return releases


def version_of(file: str) -> Version | None:
    """Return the version in a release file's name; None if it has none."""
    try:
        if file.endswith(".whl"):
            return parse_wheel_filename(file)[1]
        return parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _pick(like: ReleaseFile, version: Version, links: list[Link]) -> Link | None:
    """Return the file of a release that corresponds to a pinned one.

    The same name but for the version; else a wheel for the same machine and interpreter (an abi3
    one serves it, too).
    """
    by_name = {link.filename: link for link in links}
    same = like.file.replace(str(version_of(like.file)), str(version), 1)
    if same in by_name:
        return by_name[same]
    if not like.file.endswith(".whl"):
        return next((link for name, link in by_name.items() if name.endswith(".tar.gz")), None)

    def places(file: str) -> set[tuple[str, ...]]:
        tags = (tag for tag in parse_wheel_filename(file)[3] if not tag.abi.endswith("t"))
        machine = re.compile(r"(x86_64|aarch64|any)$")
        return {(tag.interpreter, *machine.findall(tag.platform)) for tag in tags}

    wheels = (name for name in sorted(by_name) if name.endswith(".whl"))
    return next((by_name[name] for name in wheels if places(name) & places(like.file)), None)


def _release(project: Project, name: str, upstream: Upstream, where: str) -> Release:
    """Find a release by its version on the index, or by a file on disk."""
    key, access = _source_file(upstream), project.access
    like, path = upstream.files[key], Path(where).expanduser()
    version: Version | None
    if where.endswith((".tar.gz", ".whl")):
        if not path.is_file() or (version := version_of(path.name)) is None:
            msg = f"release:{where}: no sdist or wheel of a release there"
            raise UsageError(msg, "give an existing file, or a version of the index")
        digest, size = sha256_file(path), path.stat().st_size
        download.fetch(project.store, name=path.name, sha256=digest, locate=path.resolve().as_uri)
        file = like.model_copy(update={"file": path.name, "sha256": digest, "size": size})
    else:
        try:
            version = Version(where)
        except InvalidVersion:
            msg = f"release:{where}: neither a version nor a file"
            raise UsageError(msg, "for example release:0.32.0") from None
        file = _file_listed(like, upstream, version, access)
    pinned = "v" if upstream.tag.startswith("v") else ""
    # what a release contains need not have a version of its own; then this one keeps its tag
    moved = {} if upstream.source_in else {"version": str(version), "tag": f"{pinned}{version}"}
    commit = upstream.commit if upstream.source_in else None
    files = {**upstream.files, key: file}
    fresh = upstream.model_copy(update={**moved, "files": files, "commit": commit, "patched": {}})
    # a mirror is a git repository: the release comes from the index
    here = replace(access, mirrors={})
    source = sources.ensure(project.store, name, fresh, RELEASE_PLAN, here)
    return Release(fresh, source, declared_commit=_declared_commit(source))


def _file_listed(
    like: ReleaseFile, upstream: Upstream, version: Version, access: Access
) -> ReleaseFile:
    if str(version) == upstream.version:
        return like
    links = _listed(access, like.project)
    link = _pick(like, version, links.get(version, []))
    if link is None:
        near = ", ".join(map(str, sorted(links, reverse=True)[:6]))
        msg = f"{like.project} {version}: the package index has no such release with that file"
        raise UsageError(msg, f"its newest: {near}")
    return _entry(like, link)


def _entry(like: ReleaseFile, link: Link) -> ReleaseFile:
    digest = sha256_of(link)
    if digest is None:
        msg = f"{link.filename}: the package index gives no sha256 for it"
        raise FetchError(msg, "download it and give the file: release:FILE")
    size = download.size_of(str(link.normalized), link.filename)
    fresh = {"file": link.filename, "sha256": digest, "size": size, "natives": None}
    return like.model_copy(update=fresh)


def _other_files(
    upstream: Upstream, version: Version, access: Access, but: str | None
) -> dict[str, ReleaseFile]:
    """Return a release's files on the index, by the names that pins.yaml has for them."""
    files: dict[str, ReleaseFile] = {}
    for key, like in upstream.files.items():
        if key == but:
            continue
        try:
            link = _pick(like, version, _listed(access, like.project).get(version, []))
            if link is not None:
                files[key] = _entry(like, link)
        except FetchError as error:
            log.warning(f"files.{key}: {error.what}")
    return files


# -- commits -----------------------------------------------------------------------------


def _declared_commit(source: Source) -> str | None:
    """Return the commit that a release says it was made from, maybe abbreviated."""
    listing = git.git(source.repo, "ls-tree", "-r", "--name-only", "-z", source.commit)
    for path in listing.split("\0"):
        if Path(path).name in ("_version.py", "_build_meta.py") and path.count("/") <= 1:
            text = git.git(source.repo, "show", f"{source.commit}:{path}")
            if found := _STATED.search(text):
                return found[1]
    return None


def check_commit(upstream: Upstream, commit: str, declared_commit: str | None) -> None:
    """Compare a commit with the one that the release names.

    Raises:
        IntegrityError: the release was made from another one.
        UsageError: it is an abbreviation, filled up with zeros.
    """
    if padded(commit):
        msg = f"--commit {commit}: an abbreviated SHA padded with zeros"
        raise UsageError(msg, "omit --commit: the pin then has no commit")
    if declared_commit is not None and not commit.startswith(declared_commit):
        msg = f"{upstream.tag}: commit {commit}, but the release states {declared_commit}"
        raise IntegrityError(msg, "give the commit that the release was built from: --commit SHA")


def _commit_of(name: str, fresh: Upstream, declared: str | None, access: Access) -> str | None:
    """Return the release's commit: from the release itself, or from the tag in its repository."""
    if declared is not None and len(declared) == 40:
        return declared
    url = access.mirrors.get(name, fresh.git)
    if access.offline and "://" in url:
        return None
    try:
        commit = git.remote_tag(url, fresh.tag)
    except CommandError as error:
        log.warning(f"{name}: {url} cannot be read for {fresh.tag}: {error.what.splitlines()[-1]}")
        return None
    if commit is not None:
        check_commit(fresh, commit, declared)
    return commit


def _tag_or_sha(project: Project, name: str, upstream: Upstream, spec: str) -> Release:
    access = project.access
    url = access.mirrors.get(name, upstream.git)
    local = "://" not in url and Path(url).exists()
    if access.offline and not local:
        msg = f"{name}: --offline is set, so {url} cannot be read for {spec}"
        raise FetchError(msg, f"give --mirror {name}=PATH of a clone")
    try:
        tags = git.remote_tags(str(Path(url).resolve()) if local else url)
    except CommandError as error:
        msg = f"{name}: git could not read {url}:\n{error}"
        raise FetchError(msg, f"check the network, or give --mirror {name}=URL-or-path") from error
    newest_first = _by_version(tags)
    tag = spec if spec in tags else next((one for one in newest_first if tags[one] == spec), None)
    if tag is None:
        msg = f"{name}: {url} has no tag {spec}, and no tag points to it"
        raise UsageError(msg, f"its newest tags: {', '.join(newest_first[:6]) or 'none'}")
    if not _by_version([tag]):
        msg = f"{name}: {tag} is not a release tag"
        raise UsageError(msg, "give a tag such as v0.32.0; pins.yaml pins releases")
    version = tag.removeprefix("v")
    pin = {"tag": tag, "commit": tags[tag], "version": version, "patched": {}}
    fresh = upstream.model_copy(update=pin)
    return Release(fresh, sources.ensure(project.store, name, fresh, _GIT, access))


def _by_version(tags: Iterable[str]) -> list[str]:
    """Return the tags that name versions, newest first."""
    found = {}
    for tag in tags:
        try:
            found[tag] = Version(tag.removeprefix("v"))
        except InvalidVersion:
            continue
    return sorted(found, key=lambda tag: found[tag], reverse=True)
