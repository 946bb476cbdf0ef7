"""External sources of an upstream's build → commits in the store, with their submodules.

Each is fetched by its full SHA. The tree of a commit has the SHAs of its submodules, so the commit
pins them. ``.gitmodules`` has their URLs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from sparkforge.core import git
from sparkforge.core.errors import CommandError, FetchError, IntegrityError
from sparkforge.core.log import log
from sparkforge.pins.pins import External
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

_DEPTH = 4  # submodules of submodules: more is a cycle, or no source of a kernel library


@dataclass(frozen=True)
class Fetched:
    """A commit in the store, and its submodules by their folder."""

    repo: Path
    commit: str
    submodules: tuple[tuple[str, Fetched], ...] = ()

    def named(self) -> dict[str, str]:
        """Return the commit of each submodule by its folder, inner ones too."""
        found = {}
        for path, inner in self.submodules:
            found[path] = inner.commit
            found |= {f"{path}/{below}": commit for below, commit in inner.named().items()}
        return found

    def unpack(self, where: Path) -> None:
        """Write the whole tree, submodules included, into a folder."""
        where.mkdir(parents=True, exist_ok=True)
        git.unpack(self.repo, self.commit, [], where)
        for path, inner in self.submodules:
            inner.unpack(where / path)


def ensure(store: Store, name: str, external: External, access: Access) -> Fetched:
    """Return an external, fetching it where the store lacks it.

    Args:
        name: ``UPSTREAM/EXTERNAL``, which ``--mirror`` may name, too.

    Raises:
        FetchError: it cannot be fetched.
        IntegrityError: its ``.gitmodules`` does not name a submodule that its tree has.
    """
    url = access.mirrors.get(name, external.git)
    return _ensure(store, name, url, external.commit, access, _DEPTH)


def _ensure(store: Store, name: str, url: str, commit: str, access: Access, depth: int) -> Fetched:
    # one repository an address: submodules that several have are fetched once
    repo = store.git_path(f"external-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
    if not git.has_commit(repo, commit):
        with store.lock(repo.stem):
            if not git.has_commit(repo, commit):
                _fetch(repo, name, url, commit, access)
    inner = []
    for path, sha in git.submodules(repo, commit).items():
        where = git.submodule_url(repo, commit, path)
        if where is None or depth == 0:
            msg = f"{name}: commit {commit[:12]} has the submodule {path}, but no address for it"
            raise IntegrityError(msg, "fix the commit in pins.yaml")
        # ./ and ../ are relative to the address of the repository itself
        address = urljoin(f"{url}/", where) if where.startswith((".", "..")) else where
        inner.append((path, _ensure(store, f"{name}/{path}", address, sha, access, depth - 1)))
    return Fetched(repo, commit, tuple(inner))


def _fetch(repo: Path, name: str, url: str, commit: str, access: Access) -> None:
    local = "://" not in url and Path(url).exists()
    where = str(Path(url).resolve()) if local else url
    if access.offline and not local:
        msg = f"{name}: commit {commit[:12]} is not in the store, and --offline is set"
        raise FetchError(
            msg, f"run once without --offline, or give --mirror {name}=PATH of a clone"
        )
    log.info(f"{name}: fetching {commit[:12]} from {where}")
    git.init_bare(repo)
    git.tidy(repo)
    try:
        git.fetch_commit(repo, where, commit)
    except CommandError as error:
        msg = f"{name}: git could not fetch {commit[:12]} from {where}:\n{error}"
        raise FetchError(msg, f"check the network, or give --mirror {name}=URL-or-path") from error
    git.git(repo, "update-ref", f"refs/pins/{commit}", commit)
