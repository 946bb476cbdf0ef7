"""Start git so that its output is the same for all users, and no program of a repository runs.

A repository can name programs in its own settings: hooks, filters, a file system monitor, merge
drivers. git itself refuses another user's repository for that reason. That check stays on here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import CommandError, StoreError
from sparkforge.core.run import call, failure

COMMITTER = "sparkforge"
COMMITTER_EMAIL = "sparkforge@localhost"
_SETTINGS = {
    # read from the home folder even without a global configuration
    "core.attributesFile": os.devnull,
    # hooks of a user's work tree are for the user's commits
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",  # else a program of the repository's choice, at every status
    "log.showSignature": "false",  # the same
}
# variables that a network fetch may need; others select another repository (set in a hook) or
# change git's output (GIT_DIFF_OPTS, GIT_CONFIG_PARAMETERS …)
_KEPT = (
    *("GIT_SSH", "GIT_SSL_", "GIT_HTTP_", "GIT_PROXY_", "GIT_CURL_", "GIT_ASKPASS", "GIT_TRACE"),
    *("GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_", "GIT_CONFIG_GLOBAL"),
    *("GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_ALLOW_PROTOCOL", "GIT_EXEC_PATH"),
)
_DRIVER = re.compile(r"(filter\.[\s\S]*\.(clean|smudge|process|required)|merge\.[\s\S]*\.driver)")
_NEUTRAL = {"required": "false", "driver": "git merge-file --marker-size=%L %A %O %B"}
_DUBIOUS = re.compile(rb"detected dubious ownership in repository at '(.*)'")
_Settings = tuple[tuple[str, str], ...]


class DamagedRepository(StoreError):
    """A repository of the store in which git finds damage."""

    def __init__(self, repository: Path, complaint: str) -> None:
        msg = f"{repository}: damaged: {complaint}"
        super().__init__(msg, "delete that folder: the next run fetches it again")
        self.repository = repository


def unbind() -> None:
    """Remove the user's GIT_* variables, except those that a network fetch may need."""
    for name in list(os.environ):
        if name.startswith("GIT_") and not name.startswith(_KEPT):
            del os.environ[name]


def clean_env(settings: _Settings = (), **extra: str) -> dict[str, str]:
    """Return variables with which git's output is the same for every user."""
    trusted = (("safe.directory", folder) for folder in trusted_folders())
    pairs = (*_SETTINGS.items(), *trusted, *settings)
    return {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_PARAMETERS": "",  # settings of a calling `git -c`
        "GIT_CONFIG_COUNT": str(len(pairs)),  # these replace the user's
        **{f"GIT_CONFIG_KEY_{at}": key for at, (key, _) in enumerate(pairs)},
        **{f"GIT_CONFIG_VALUE_{at}": value for at, (_, value) in enumerate(pairs)},
        "GIT_ALLOW_PROTOCOL": "file",  # no network, regardless of settings
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_DIFF_OPTS": "",
        "GIT_DEFAULT_HASH": "sha1",
        "GIT_TERMINAL_PROMPT": "0",  # fail instead of asking for a password
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_COMMITTER_NAME": COMMITTER,
        "GIT_COMMITTER_EMAIL": COMMITTER_EMAIL,
        **extra,
    }


def isolated(
    repo: Path,
    *args: str,
    stdin: bytes | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git on a repository, without the user's settings and the repository's programs.

    Raises:
        CommandError: git ended with an error (only with ``check``).
        StoreError: the repository is another user's, or a damaged one of the store; or its disk
            is full.
    """
    variables = {**environment(repo), **(env or {})}
    done = call("git", "-C", repo, *args, stdin=stdin, env=variables, check=False)
    if done.returncode:
        check_dubious(done.stderr)
    if check and done.returncode:
        # git does not always report the system's error: "couldn't write 'ORIG_HEAD.lock'"
        with disk_errors(repo), explained(repo):
            raise failure(done)
    return done


def environment(repo: Path) -> dict[str, str]:
    """Return variables for git in a repository, as ``isolated`` has them."""
    return clean_env(_without_drivers(repo))


def no_programs(tree: Path) -> list[str]:
    """Return options for a git with the user's settings in a work tree, as in ``isolated``."""
    pairs = (*_SETTINGS.items(), *_without_drivers(tree))
    # attributes may be the user's
    kept = [f"{key}={value}" for key, value in pairs if key != "core.attributesFile"]
    return [word for pair in kept for word in ("-c", pair)]


@cache
def _without_drivers(repo: Path) -> _Settings:
    """Return settings that disable the programs in a repository's own settings.

    A repository chooses the names of its filters. git lists them, and runs none for that. The
    store's own bare repositories have none.
    """
    if (repo / "objects").is_dir():
        return ()
    words = ("git", "-C", repo, "config", "--null", "--name-only", "--list")
    listed = call(*words, env=clean_env(), check=False).stdout
    names = sorted(set(listed.decode(errors="surrogateescape").split("\0")))
    return tuple(
        (name, _NEUTRAL.get(name.rpartition(".")[2], ""))
        for name in names
        if _DRIVER.fullmatch(name)
    )


# -- damage ------------------------------------------------------------------------------


@contextmanager
def explained(repo: Path) -> Iterator[None]:
    """Turn git's failure in a damaged repository of the store into DamagedRepository."""
    try:
        yield
    except CommandError as error:
        bare = _bare(repo)
        if bare is not None and (complaint := _damage(bare)):
            raise DamagedRepository(bare, complaint) from error
        raise


def _damage(bare: Path) -> str:
    """Return the problems that ``git fsck`` finds in a repository, or ""."""
    if not (bare / "HEAD").is_file():
        return "no HEAD"
    words = ("git", "-C", bare, "fsck", "--no-dangling", "--no-progress")
    done = call(*words, env=clean_env(), check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr + done.stdout).decode(errors="replace").strip().partition("\n")[0]


def _bare(repo: Path) -> Path | None:
    """Return the bare repository of a folder: itself, or that of its work tree; else None."""
    if (repo / "objects").is_dir():
        return repo
    link = repo / ".git"
    entry = Path(link.read_text().removeprefix("gitdir:").strip()) if link.is_file() else repo
    return entry.parent.parent if entry.parent.name == "worktrees" else None


# -- owners ------------------------------------------------------------------------------


def check_owner(folder: Path) -> None:
    """Refuse another user's folder as git does, with StoreError, unless git's settings trust it."""
    try:
        owner = folder.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return  # not created yet
    # under sudo also its caller's, as in git
    sudo = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    trusted = {"*", str(folder)} & set(trusted_folders())
    if not trusted and owner != os.geteuid() and str(owner) != sudo:
        raise _foreign(folder, f"another user (uid {owner})")


def check_dubious(stderr: bytes) -> None:
    """Raise StoreError if git refused another user's repository."""
    if match := _DUBIOUS.search(stderr):
        raise _foreign(Path(os.fsdecode(match[1])), "another user")


def _foreign(folder: Path, whom: str) -> StoreError:
    msg = f"{folder}: belongs to {whom}, who could make us run any program"
    remedy = (
        "use a folder of your own (a store: --store DIR); if you trust that user:"
        f" git config --global --add safe.directory {folder}"
    )
    return StoreError(msg, remedy)


@cache
def trusted_folders() -> tuple[str, ...]:
    """Return the folders of any owner that the user's git settings trust."""
    words = ("git", "config", "--null", "--get-all", "safe.directory")
    listed = call(*words, cwd=Path("/"), check=False).stdout.decode(errors="surrogateescape")
    return tuple(listed.split("\0")[:-1])
