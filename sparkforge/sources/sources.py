"""Pin → commit in the store's bare repository, from one of two providers.

``git`` fetches the pinned commit and checks that the pinned tag names it. ``release`` turns the
release file of the same version into a commit with a fixed author and date, so that a series
applies to it and the patched tree has the same hash everywhere.
"""

import gzip
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkforge.core import git
from sparkforge.core.disk import code_digest, key_of
from sparkforge.core.errors import CommandError, FetchError, IntegrityError, PinsError
from sparkforge.core.index import Index
from sparkforge.core.log import human_bytes, log
from sparkforge.pins.pins import Provider, ReleaseFile, SourcePlan, Upstream
from sparkforge.pins.types import PathRule, origin_of
from sparkforge.sources.download import fetch
from sparkforge.store.store import Store

_RELEASE_INSTEAD = "to build from the release file: build.py --target NAME --source release"
UNREADABLE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, struct.error),
    *(EOFError, LookupError, OverflowError, RuntimeError, ValueError),
)
"""The standard library's errors for files that are no archives, damaged, encrypted, or packed in
unknown ways."""
_IMPORT_AUTHOR = "sparkforge release import <sparkforge@localhost>"


@dataclass(frozen=True)
class Source:
    """An upstream's pinned tree as a commit in ``repo``; a release file's commit is our own."""

    upstream: str
    provider: Provider
    repo: Path
    commit: str
    tree: str
    origin: str

    @property
    def instead(self) -> list[str]:
        """The hint for a wrong tree from git; never applied automatically."""
        return [_RELEASE_INSTEAD] if self.provider == "git" else []


@dataclass(frozen=True)
class Access:
    """Access to sources."""

    index: Index
    mirrors: Mapping[str, str]
    """URLs or paths by upstream, instead of the pinned git URL."""
    offline: bool


def ensure(store: Store, name: str, upstream: Upstream, plan: SourcePlan, access: Access) -> Source:
    """Return the upstream's source, fetched if the store lacks it.

    IntegrityError: the tag names another commit, or a file has another hash.
    """
    mirrored = name in access.mirrors  # which implies git
    if plan == "release" and not mirrored:
        return release(store, name, upstream, access)
    try:
        if upstream.commit is None:
            msg = f"{name}: no commit in pins.yaml for {upstream.tag}"
            raise PinsError(msg, how_to_pin(upstream))
        return _git(store, name, upstream, upstream.commit, access)
    except (FetchError, PinsError) as error:
        if plan != "auto" or mirrored or upstream.source_file is None:
            raise
        log.warning(f"{error.what}: using the release file instead of git")
        return release(store, name, upstream, access)


def how_to_pin(upstream: Upstream) -> str:
    """Return the hint for an upstream whose commit is unknown."""
    lookup = f"git ls-remote {upstream.git} {upstream.tag} '{upstream.tag}^{{}}'"
    return f"look it up: {lookup} (the last line), and write it as commit: in pins.yaml"


def fetch_release_file(store: Store, file: ReleaseFile, access: Access) -> Path:
    """Return a pinned release file, downloaded if the store lacks it."""
    return fetch(
        store,
        name=file.file,
        sha256=file.sha256,
        size=file.size,
        offline=access.offline,
        locate=lambda: access.index.url_of(file.project, file.file),
    )


def _git(store: Store, name: str, upstream: Upstream, commit: str, access: Access) -> Source:
    repo = store.git_path(name)
    # the ref is set after the check of the tag, so it means "fetched and checked"
    ref = f"refs/pins/{upstream.tag}/{commit}"
    with store.lock(f"git-{name}"):
        if git.ref_commit(repo, ref) != commit:
            where = access.mirrors.get(name, upstream.git)
            try:
                _fetch_git(repo, name, upstream, commit, where, offline=access.offline)
            except CommandError as error:
                msg = f"{name}: git could not fetch from {where}:\n{error}"
                remedy = f"check the network, or give --mirror {name}=URL-or-path"
                raise FetchError(msg, f"{remedy}; {_RELEASE_INSTEAD}") from error
            git.git(repo, "update-ref", ref, commit)
    log.info(f"{name}: git commit {commit[:12]} ({upstream.tag})")
    tree = git.git(repo, "rev-parse", f"{commit}^{{tree}}")
    return Source(name, "git", repo, commit, tree, f"git {upstream.git}")


def _fetch_git(
    repo: Path, name: str, upstream: Upstream, commit: str, where: str, *, offline: bool
) -> None:
    """Fetch the pinned commit, which the pinned tag must name."""
    if "://" not in where and Path(where).exists():
        where = str(Path(where).resolve())
    elif offline:
        msg = f"{name}: {upstream.tag} is not in the store, and --offline is set"
        remedy = f"run once without --offline, or give --mirror {name}=PATH of a clone"
        raise FetchError(msg, remedy)
    tags = (f"refs/tags/{upstream.tag}", f"refs/tags/{upstream.tag}^{{}}")
    tagged = git.remote_tags(where, *tags).get(upstream.tag)
    if tagged != commit:
        what = f"is {tagged}, but {commit} is pinned" if tagged else f"is not in {where}"
        remedy = f"compare with the release page before changing pins.yaml; {_RELEASE_INSTEAD}"
        raise IntegrityError(f"{name}: tag {upstream.tag} {what}", remedy)
    log.info(f"{name}: fetching {commit[:12]} ({upstream.tag}) from {where}")
    git.init_bare(repo)
    git.tidy(repo)
    git.fetch_commit(repo, where, commit)


def release(store: Store, name: str, upstream: Upstream, access: Access) -> Source:
    """Return the source from the release file; raises as ``ensure``."""
    if upstream.source_file is None:
        msg = f"upstreams.{name}: it has no release file to use instead of its git commit"
        raise PinsError(msg, f"give --mirror {name}=URL-or-path of a git repository")
    file = upstream.files[upstream.source_file]
    repo = store.git_path(name)
    # of a wheel, the commit also depends on its files' paths in the repository
    rules = {"paths": [rule.model_dump() for rule in upstream.paths]}
    places = f"-{key_of(rules)[:16]}" if file.is_wheel else ""
    # a change of how archives become commits needs a new name: old stores keep the old commits
    ref = f"refs/release/{code_digest(Path(__file__), Path(git.__file__))}/{file.sha256}{places}"
    with store.lock(f"git-{name}"):
        commit = git.ref_commit(repo, ref)
        if commit is None:
            path = fetch_release_file(store, file, access)
            log.info(f"{name}: importing {file.file} ({human_bytes(file.size)}) into git")
            git.init_bare(repo)
            git.tidy(repo)
            # wheels of all platforms have the same Python files, and one commit
            told = "Python files of its wheel" if file.is_wheel else f"release file {file.file}"
            message = f"{name} {upstream.version}, {told}\n"
            files = _wheel_files(path, upstream.paths) if file.is_wheel else sdist_files(path)
            how = {"ref": ref, "message": message, "author": _IMPORT_AUTHOR}
            try:
                # 2000-01-01: fixed, and clearly not a date of upstream's
                commit = git.import_tree(repo, files, **how, epoch=946684800)
            except UNREADABLE as error:
                msg = f"{path.name}: not a readable archive: {error}"
                raise IntegrityError(msg, "the pinned file is damaged: fix pins.yaml") from error
    log.info(f"{name}: release file {file.file}, imported as commit {commit[:12]}")
    tree = git.git(repo, "rev-parse", f"{commit}^{{tree}}")
    return Source(name, "release", repo, commit, tree, f"release file {file.file}")


def _refused(archive: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{archive.name}: {what}", "do not use this file")


def _safe(path: str, archive: Path) -> str:
    pure = PurePosixPath(path)
    inside = pure.parts and not pure.is_absolute() and ".." not in pure.parts
    if not inside or any(part.lower() == ".git" for part in pure.parts):
        raise _refused(archive, f"member {path!r} is outside the tree")
    return str(pure)


def sdist_files(archive: Path) -> Iterator[git.TreeFile]:
    """Yield an sdist's files without their top folder, in the archive's order."""
    tops = set()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            top, _, path = _safe(member.name, archive).partition("/")
            tops.add(top)
            if len(tops) > 1 or not (path or member.isdir()):
                raise _refused(archive, f"member {member.name!r} is not in the single top folder")
            if member.issym():
                target = member.linkname.encode(errors="surrogateescape")
                yield git.TreeFile(path, "120000", target)
            elif content := tar.extractfile(member):  # of a hard link: of what it leads to
                mode = "100755" if member.mode & stat.S_IXUSR else "100644"
                yield git.TreeFile(path, mode, content.read())
            elif not member.isdir():
                raise _refused(archive, f"member {member.name!r} is neither file nor link")


def _wheel_files(archive: Path, rules: Sequence[PathRule]) -> Iterator[git.TreeFile]:
    """Yield a wheel's Python files with their paths in the repository.

    Its other files are no sources, and files without a rule belong to another upstream.
    """
    with zipfile.ZipFile(archive) as wheel:
        for info in wheel.infolist():
            member = _safe(info.filename, archive) if not info.is_dir() else ""
            origin = origin_of(rules, member)
            if member.endswith(".py") and origin is not None:
                executable = (info.external_attr >> 16) & stat.S_IXUSR
                mode = "100755" if executable else "100644"
                yield git.TreeFile(origin[1], mode, wheel.read(info))
