"""The goal of a rebase: words like ``release:0.32.0`` → the upstream as pins.yaml would pin it.

The package index lists a release's files with sha256 and size. The file that replaces the commit
is fetched and checked; a build checks the others when it fetches them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from sparkforge.core.errors import CommandError, FetchError, IntegrityError, UsageError
from sparkforge.core.hashing import sha256_file
from sparkforge.core.index import sha256_of
from sparkforge.core.log import log
from sparkforge.pins.pins import RELEASE_PLAN, ReleaseFile, SourcePlan, Upstream
from sparkforge.pins.types import padded
from sparkforge.sources import download, sources
from sparkforge.sources.project import Project
from sparkforge.sources.sources import Access, Source
from sparkforge.store.store import Store

if TYPE_CHECKING:
    from unearth.link import Link

_GIT = SourcePlan(provider="git")
_GIT_OR_RELEASE = SourcePlan(provider="git", fallback="release")
_STATED = re.compile(
    r"""(?:commit_id|git_version|__git_commit__)\w*\s*=[^'"\n]*['"]g?([0-9a-f]{7,40})['"]"""
)


@dataclass(frozen=True)
class Release:
    """A release to move to."""

    upstream: Upstream
    """As pins.yaml would have it; its commit is None if unknown."""
    source: Source
    """Its tree."""
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
    store, access, upstream = project.store, project.access, project.pins.upstream(name)
    if spec == "latest":
        spec = f"release:{newest(access, upstream)[0]}"
    if spec.startswith("release:"):
        return _release(store, name, upstream, spec.removeprefix("release:"), access, complete)
    return _tag_or_sha(store, name, upstream, spec, access, complete)


def old_source(project: Project, name: str, release: Release) -> Source:
    """Return the pinned source, of the same kind as the new one if possible."""
    store, access, upstream = project.store, project.access, project.pins.upstream(name)
    if release.source.provider == "release":
        return sources.ensure(store, name, upstream, RELEASE_PLAN, replace(access, mirrors={}))
    return sources.ensure(store, name, upstream, _GIT_OR_RELEASE, access)


# -- releases on the index -------------------------------------------------------------


def newest(access: Access, upstream: Upstream, count: int = 1) -> list[str]:
    """Return the newest final releases on the index, newest first; of post releases the last.

    Raises:
        FetchError: the index does not answer, or ``--offline`` forbids it.
    """
    file = _stand_in(upstream)
    finals: dict[tuple[int, ...], Version] = {}
    for version, links in _listed(access, file.project).items():
        if version.is_prerelease or not _pick(file, upstream.version, version, links):
            continue
        if version.release not in finals or finals[version.release] < version:
            finals[version.release] = version
    versions = [str(version) for version in sorted(finals.values(), reverse=True)[:count]]
    if not versions:
        msg = f"{file.project}: the package index has no release of it"
        raise FetchError(msg, "check pip's configuration (pip config list)")
    return versions


def _stand_in(upstream: Upstream) -> ReleaseFile:
    if upstream.source_file is None:
        msg = "it has no release file to use instead of its git commit"
        raise UsageError(msg, "give a tag or a commit, or add a source_file in pins.yaml")
    return upstream.files[upstream.source_file]


def _listed(access: Access, project: str) -> dict[Version, list[Link]]:
    if access.offline:
        msg = f"{project}: --offline is set, so the package index cannot be read"
        raise FetchError(msg, "run without --offline, or give a file: release:FILE")
    releases: dict[Version, list[Link]] = {}
    for link in access.index.links(project):
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


def _pick(like: ReleaseFile, old: str, version: Version, links: list[Link]) -> Link | None:
    """Return the file of a release that corresponds to a pinned one.

    The same name but for the version; else a wheel for the same machine and interpreter (an abi3
    one serves it, too).
    """
    by_name = {link.filename: link for link in links}
    if (same := by_name.get(like.file.replace(old, str(version), 1))) is not None:
        return same
    if not like.file.endswith(".whl"):
        return next((link for name, link in by_name.items() if name.endswith(".tar.gz")), None)
    tags = parse_wheel_filename(like.file)[3]
    machine = re.compile(r"(x86_64|aarch64|any)$")
    platforms = {(tag.interpreter, *machine.findall(tag.platform)) for tag in tags}
    for name, link in sorted(by_name.items()):
        if name.endswith(".whl") and platforms & {
            (tag.interpreter, *machine.findall(tag.platform))
            for tag in parse_wheel_filename(name)[3]
            if not tag.abi.endswith("t")
        }:
            return link
    return None


def _release(
    store: Store, name: str, upstream: Upstream, spec: str, access: Access, complete: bool
) -> Release:
    at_hand = Path(spec).expanduser()
    if spec.endswith((".tar.gz", ".whl")):
        if not at_hand.is_file():
            raise UsageError(f"{at_hand}: no such file", "give a release file or a version")
        version = version_of(at_hand.name)
    else:
        try:
            version = Version(spec)
        except InvalidVersion:
            version = None
    if version is None:
        msg = f"release:{spec}: neither a version nor the name of a release file"
        raise UsageError(msg, "for example release:0.32.0")
    like = _stand_in(upstream)
    assert upstream.source_file is not None
    if spec.endswith((".tar.gz", ".whl")):
        file = _file_at_hand(store, like, at_hand)
    else:
        file = _file_listed(like, upstream, version, access)
    pinned = "v" if upstream.tag.startswith("v") else ""
    # a release that lends its files has a version of its own; then this one keeps its tag
    moved = {} if upstream.source_in else {"version": str(version), "tag": f"{pinned}{version}"}
    fresh = upstream.model_copy(
        update={
            **moved,
            "files": {**upstream.files, upstream.source_file: file},
            "commit": upstream.commit if upstream.source_in else None,
            "patched": {},
        }
    )
    # a mirror is a git repository: the release comes from the index
    source = sources.ensure(store, name, fresh, RELEASE_PLAN, replace(access, mirrors={}))
    release = Release(fresh, source, declared_commit=read_declared_commit(source))
    return _completed(name, upstream, release, version, access) if complete else release


def _file_at_hand(store: Store, like: ReleaseFile, path: Path) -> ReleaseFile:
    digest, size = sha256_file(path), path.stat().st_size
    download.fetch(store, name=path.name, sha256=digest, locate=path.resolve().as_uri)
    return like.model_copy(update={"file": path.name, "sha256": digest, "size": size})


def _file_listed(
    like: ReleaseFile, upstream: Upstream, version: Version, access: Access
) -> ReleaseFile:
    if str(version) == upstream.version:
        return like
    links = _listed(access, like.project)
    link = _pick(like, _own_version(like), version, links.get(version, []))
    if link is None:
        near = ", ".join(map(str, sorted(links, reverse=True)[:6]))
        msg = f"{like.project} {version}: the package index has no such release with that file"
        raise UsageError(msg, f"its newest: {near}")
    return _entry(like, link)


def _own_version(file: ReleaseFile) -> str:
    return str(version_of(file.file))


def _entry(like: ReleaseFile, link: Link) -> ReleaseFile:
    digest = sha256_of(link)
    if digest is None:
        msg = f"{link.filename}: the package index gives no sha256 for it"
        raise FetchError(msg, "download it and give the file: release:FILE")
    size = download.size_of(str(link.normalized), link.filename)
    fresh = {"file": link.filename, "sha256": digest, "size": size, "natives": None}
    return like.model_copy(update=fresh)


def _completed(
    name: str, upstream: Upstream, release: Release, version: Version, access: Access
) -> Release:
    """Add the other parts of the pin: the other files, and the commit."""
    fresh = release.upstream
    files, lacking = _other_files(upstream, version, access, but=upstream.source_file)
    commit = fresh.commit or _commit_of(name, fresh, release.declared_commit, access)
    fresh = fresh.model_copy(update={"files": {**fresh.files, **files}, "commit": commit})
    return replace(release, upstream=fresh, lacking=lacking)


def _other_files(
    upstream: Upstream, version: Version, access: Access, but: str | None
) -> tuple[dict[str, ReleaseFile], tuple[str, ...]]:
    """Return a release's files by the names that pins.yaml has for them, and those not found."""
    files: dict[str, ReleaseFile] = {}
    for key, like in upstream.files.items():
        if key == but:
            continue
        try:
            links = _listed(access, like.project).get(version, [])
            link = _pick(like, _own_version(like), version, links)
            if link is not None:
                files[key] = _entry(like, link)
        except FetchError as error:
            log.warning(f"files.{key}: {error.what}")
    lacking = tuple(key for key in upstream.files if key not in files and key != but)
    return files, lacking


def read_declared_commit(source: Source) -> str | None:
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


def _commit_of(
    name: str, fresh: Upstream, declared_commit: str | None, access: Access
) -> str | None:
    """Return the release's commit: from the release itself, or from the tag in its repository."""
    if declared_commit is not None and len(declared_commit) == 40:
        return declared_commit
    url = access.mirrors.get(name, fresh.git)
    if access.offline and "://" in url:
        return None
    try:
        commit = git.remote_tag(url, fresh.tag)
    except CommandError as error:
        log.warning(f"{name}: {url} cannot be read for {fresh.tag}: {error.what.splitlines()[-1]}")
        return None
    if commit is not None:
        check_commit(fresh, commit, declared_commit)
    return commit


# -- git -----------------------------------------------------------------------------------


def _tag_or_sha(
    store: Store, name: str, upstream: Upstream, spec: str, access: Access, complete: bool
) -> Release:
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
    named = (tag for tag in _newest_tags(tags, None) if tags[tag] == spec)
    tag = spec if spec in tags else next(named, None)
    if tag is None:
        msg = f"{name}: {url} has no tag {spec}"
        if re.fullmatch(r"[0-9a-f]{40}", spec):
            msg = f"{name}: no tag of {url} points to {spec}; pins.yaml pins releases"
        raise UsageError(msg, f"its newest tags: {', '.join(_newest_tags(tags)) or 'none'}")
    version = tag.removeprefix("v")
    try:
        parsed = Version(version)
    except InvalidVersion:
        msg = f"{name}: {tag} is not a release tag"
        raise UsageError(msg, "give a tag such as v0.32.0; pins.yaml pins releases") from None
    fresh = upstream.model_copy(
        update={"tag": tag, "commit": tags[tag], "version": version, "patched": {}}
    )
    release = Release(fresh, sources.ensure(store, name, fresh, _GIT, access))
    if not complete:
        return release
    files, lacking = _other_files(upstream, parsed, access, but=None)
    fresh = fresh.model_copy(update={"files": {**fresh.files, **files}})
    return replace(release, upstream=fresh, lacking=lacking)


def _newest_tags(tags: Mapping[str, str], count: int | None = 6) -> list[str]:
    def rank(tag: str) -> tuple[bool, Version]:
        try:
            return True, Version(tag.removeprefix("v"))
        except InvalidVersion:
            return False, Version("0")

    return sorted(tags, key=rank, reverse=True)[:count]
