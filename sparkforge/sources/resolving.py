"""Find the commit of a pinned tag in its repository, and compare it with the release file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from sparkforge.core import git
from sparkforge.core.errors import CommandError, FetchError, IntegrityError
from sparkforge.pins.pins import RELEASE_PLAN, SourcePlan, Upstream
from sparkforge.sources import sources
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

_SHOWN = 10
# files that a source release replaces
_GENERATED = frozenset({"PKG-INFO", "setup.cfg", "_version.py", "_build_meta.py"})


@dataclass(frozen=True)
class Resolved:
    """An upstream's commit."""

    commit: str
    """Of the tag in the repository, 40 hex digits."""
    files: int
    """Number of files in the release file that equal the commit's."""


def resolve(store: Store, name: str, upstream: Upstream, access: Access) -> Resolved:
    """Return the commit of the pinned tag in an upstream's repository, compared with the release.

    Raises:
        FetchError: the repository or the release file cannot be downloaded.
        IntegrityError: it has no such tag, the tag names another commit than pins.yaml, or a file
            of the release differs from the commit's.
    """
    url = access.mirrors.get(name, upstream.git)
    if access.offline and "://" in url:
        msg = f"{name}: --offline is set, so {url} cannot be read for {upstream.tag}"
        raise FetchError(msg, f"give --mirror {name}=PATH of a clone")
    try:
        commit = git.remote_tag(url, upstream.tag)
    except CommandError as error:
        msg = f"{name}: git could not read {url}:\n{error}"
        raise FetchError(msg, f"check the network, or give --mirror {name}=URL-or-path") from error
    if commit is None:
        msg = f"{name}: {url} has no tag {upstream.tag}"
        raise IntegrityError(msg, "fix the tag in pins.yaml, or use a mirror that has tags")
    known = upstream.model_copy(update={"commit": upstream.commit or commit})
    fetched = sources.ensure(store, name, known, SourcePlan(provider="git"), access)
    if upstream.source_file is None:
        return Resolved(commit, 0)
    here = replace(access, mirrors={})
    release = sources.ensure(store, name, upstream, RELEASE_PLAN, here)
    of_git, of_release = _blobs(fetched), _blobs(release)
    both = [
        path
        for path in sorted(of_git.keys() & of_release.keys())
        if PurePosixPath(path).name not in _GENERATED
    ]
    differing = [path for path in both if of_git[path] != of_release[path]]
    if differing or not both:
        shown = ", ".join(differing[:_SHOWN]) + (", …" if len(differing) > _SHOWN else "")
        differ = (
            f"{len(differing)} of {len(both)} files differ: {shown}"
            if both
            else "no file in common"
        )
        msg = (
            f"{name}: {upstream.tag} is {commit}, but {release.origin} was built from something"
            f" else: {differ}"
        )
        raise IntegrityError(msg, "compare both before pinning either")
    return Resolved(commit, len(both))


def _blobs(source: sources.Source) -> dict[str, str]:
    listing = git.git(source.repo, "ls-tree", "-r", "-z", source.commit)
    rows = (entry.split("\t", 1) for entry in filter(None, listing.split("\0")))
    return {path: meta.split(" ")[2] for meta, path in rows if meta.split(" ")[1] == "blob"}
