"""Sources that an upstream's build would fetch: an archive in the store, with submodules.

Each is fetched by its full SHA. The tree of a commit has the SHAs of its submodules, so the commit
pins them.
"""

from __future__ import annotations

from pathlib import Path

from sparkforge.build.cached import Cached
from sparkforge.build.context import Context
from sparkforge.build.results import ExternalResult
from sparkforge.core.disk import intact, sha256_file
from sparkforge.core.errors import CommandError, FetchError
from sparkforge.core.log import log
from sparkforge.core.run import call
from sparkforge.sources.download import Fetches
from sparkforge.store.store import code_of

ARCHIVE = "source.tar"


def external_item(context: Context, upstream: str, external: str) -> Cached[ExternalResult]:
    """Return a repository that an upstream's build would fetch, at its pinned commit.

    Raises (when it is made):
        FetchError: git cannot fetch it, or one of its submodules.
    """
    pin = context.pins.upstream(upstream).externals[external]
    name = f"{upstream}/{external}"

    def make(folder: Path) -> ExternalResult:
        url = context.access.mirrors.get(name, pin.git)
        local = "://" not in url and Path(url).exists()
        if context.access.offline and not local:
            msg = f"{name}: commit {pin.commit[:12]} is not in the store, and --offline is set"
            remedy = f"run once without --offline, or give --mirror {name}=PATH of a clone"
            raise FetchError(msg, remedy)
        url = str(Path(url).resolve()) if local else url
        log.info(f"{name}: fetching {pin.commit[:12]} from {url}")
        with context.store.temporary("external") as work:
            try:
                _check_out(work, url, pin.commit, "always" if local else "never")
            except CommandError as error:
                msg = f"{name}: git could not fetch {pin.commit[:12]} from {url}:\n{error}"
                remedy = f"check the network, or give --mirror {name}=URL-or-path"
                raise FetchError(msg, remedy) from error
            out = folder / ARCHIVE
            call("tar", "--create", "--exclude=.git", "--file", out, "--directory", work, ".")
        return ExternalResult(pin.commit, sha256_file(out))

    return Cached(
        "sources",
        f"external {name}",
        {"commit": pin.commit, "code": code_of(__name__)},
        ExternalResult,
        make,
        valid=lambda artefact: intact(artefact.path / ARCHIVE, artefact.result.sha256),
        fetches=lambda: Fetches(unknown=(f"{name} by git",)),
    )


def _check_out(where: Path, url: str, commit: str, files: str) -> None:
    """Check a commit out with its submodules.

    Args:
        files: git's ``protocol.file.allow``: whether submodules may be folders of this machine.
    """

    def git(*words: str) -> None:
        options = ("-c", f"protocol.file.allow={files}", "-c", "core.hooksPath=/dev/null")
        call("git", "-C", where, *options, *words, env={"GIT_TERMINAL_PROMPT": "0"}, stream=True)

    git("init", "--quiet", "--template=")
    git("remote", "add", "origin", url)  # addresses of submodules may be relative to it
    git("fetch", "--quiet", "--depth=1", "--no-tags", "origin", commit)
    git("checkout", "--quiet", "FETCH_HEAD")
    git("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1", "--checkout")
