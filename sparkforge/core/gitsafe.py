"""Start git so that its output is the same for all users, and no program of a repository runs.

A repository can name programs in its own settings: hooks, filters, a file system monitor, merge
drivers. git itself refuses another user's repository for that reason. That check stays on here.
"""

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
_Settings = tuple[tuple[str, str], ...]


class DamagedRepository(StoreError):
    """A repository of the store in which git finds damage."""

    def __init__(self, repository: Path, complaint: str) -> None:
        hint = "delete that folder: the next run fetches it again"
        super().__init__(f"{repository}: damaged: {complaint}", hint)


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

    CommandError: git ended with an error (only with ``check``). StoreError: the repository is
    another user's, or a damaged one of the store; or its disk is full.
    """
    variables = {**environment(repo), **(env or {})}
    done = call("git", "-C", repo, *args, stdin=stdin, env=variables, check=False)
    if done.returncode and b"detected dubious ownership" in done.stderr:
        raise _foreign(repo)
    if check and done.returncode:
        # git does not always report the system's error: "couldn't write 'ORIG_HEAD.lock'"
        with disk_errors(repo), explained(repo):
            raise failure(done)
    return done


def environment(repo: Path) -> dict[str, str]:
    """Return variables for git in a repository, as ``isolated`` has them."""
    return clean_env(_without_drivers(repo))


@cache
def _without_drivers(repo: Path) -> _Settings:
    """Return settings that disable the programs in a repository's own settings.

    A repository chooses the names of its filters. git lists them, and runs none for that.
    """
    if (repo / "objects").is_dir():
        return ()  # the store's own bare repositories have none
    words = ("git", "-C", repo, "config", "--null", "--name-only", "--list")
    listed = call(*words, env=clean_env(), check=False).stdout.decode(errors="surrogateescape")
    drivers = filter(_DRIVER.fullmatch, sorted(set(listed.split("\0"))))
    return tuple((name, _NEUTRAL.get(name.rpartition(".")[2], "")) for name in drivers)


@contextmanager
def explained(repo: Path) -> Iterator[None]:
    """Turn git's failure in a damaged repository of the store into DamagedRepository."""
    try:
        yield
    except CommandError as error:
        bare, link = repo, repo / ".git"
        if link.is_file():  # a work tree of a bare repository
            bare = Path(repo, link.read_text().removeprefix("gitdir:").strip()).parent.parent
        if (bare / "objects").is_dir():
            words = ("git", f"--git-dir={bare}", "fsck", "--no-dangling", "--no-progress")
            done = call(*words, env=clean_env(), check=False)
            if done.returncode:
                said = (done.stderr + done.stdout).decode(errors="replace").strip()
                raise DamagedRepository(bare, said.partition("\n")[0]) from error
        raise


def check_owner(folder: Path) -> None:
    """Refuse another user's folder as git does, with StoreError, unless git's settings trust it."""
    if not folder.is_dir():
        return  # not created yet
    owner = folder.stat().st_uid
    # under sudo also its caller's, as in git
    ours = (os.geteuid(), int(os.environ.get("SUDO_UID", "0")) if os.geteuid() == 0 else -1)
    if owner not in ours and not {"*", str(folder)} & set(trusted_folders()):
        raise _foreign(folder)


def _foreign(folder: Path) -> StoreError:
    remedy = (
        "use a folder of your own (a store: --store DIR); if you trust that user:"
        f" git config --global --add safe.directory {folder}"
    )
    what = f"{folder}: belongs to another user, who could make us run any program"
    return StoreError(what, remedy)


@cache
def trusted_folders() -> tuple[str, ...]:
    """Return the folders of any owner that the user's git settings trust."""
    words = ("git", "config", "--null", "--get-all", "safe.directory")
    listed = call(*words, cwd=Path("/"), check=False).stdout.decode(errors="surrogateescape")
    return tuple(listed.split("\0")[:-1])
