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
    "GIT_SSH",
    "GIT_SSL_",
    "GIT_HTTP_",
    "GIT_PROXY_",
    "GIT_ASKPASS",
    "GIT_ALLOW_PROTOCOL",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_KEY_",
    "GIT_CONFIG_VALUE_",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
    "GIT_CONFIG_NOSYSTEM",
    "GIT_TRACE",
    "GIT_CURL_",
    "GIT_EXEC_PATH",
)
_DRIVER = re.compile(r"(filter\.[\s\S]*\.(clean|smudge|process|required)|merge\.[\s\S]*\.driver)")
_DUBIOUS = re.compile(rb"detected dubious ownership in repository at '(.*)'")
_Settings = tuple[tuple[str, str], ...]


class DamagedRepository(StoreError):
    """A repository of the store in which git finds damage."""

    def __init__(self, repository: Path, complaint: str) -> None:
        msg = f"{repository}: damaged: {complaint}"
        super().__init__(msg, "delete that folder: the next run fetches it again")
        self.repository = repository


def clean_env(settings: _Settings = (), **extra: str) -> dict[str, str]:
    """Return variables with which git's output is the same for every user."""
    pairs = (*_SETTINGS.items(), *settings)
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


def unbind() -> None:
    """Remove the user's GIT_* variables, except those that a network fetch may need."""
    for name in list(os.environ):
        if name.startswith("GIT_") and not name.startswith(_KEPT):
            del os.environ[name]


def isolated(
    repo: Path,
    *args: str,
    stdin: bytes | None = None,
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
    """Return variables for git in a repository: no user's settings, no program of the repository.

    Raises:
        StoreError: the repository is another user's.
    """
    tree = _work_tree(repo)
    settings = _of_owner(repo, tree)
    return clean_env(settings if tree is None else settings + _without_drivers(tree, settings))


def no_programs(tree: Path) -> list[str]:
    """Return options for a git with the user's settings in a work tree, as in ``isolated``."""
    pairs = (*_SETTINGS.items(), *_without_drivers(tree, _of_owner(tree, tree)))
    # attributes may be the user's
    return [
        word
        for key, value in pairs
        if key != "core.attributesFile"
        for word in ("-c", f"{key}={value}")
    ]


@contextmanager
def explained(repo: Path) -> Iterator[None]:
    """Turn git's failure in a damaged repository of the store into its own error.

    Raises:
        DamagedRepository: ``git fsck`` finds damage.
    """
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
    done = call(*words, env=clean_env(_of_owner(bare)), check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr + done.stdout).decode(errors="replace").strip().partition("\n")[0]


def _bare(repo: Path) -> Path | None:
    """Return the bare repository of a folder: itself, or that of its work tree; else None."""
    if (repo / "objects").is_dir():
        return repo
    link = repo / ".git"
    if not link.is_file():
        return None
    entry = Path(link.read_text().removeprefix("gitdir:").strip())
    return entry.parent.parent if entry.parent.name == "worktrees" else None


@cache
def _without_drivers(tree: Path, settings: _Settings) -> _Settings:
    """Return settings that disable the programs in a work tree's own settings.

    A repository chooses the names of its filters. git lists them, and runs none for that.
    """
    words = ("git", "-C", tree, "config", "--null", "--name-only", "--list")
    done = call(*words, env=clean_env(settings), check=False)
    names = done.stdout.decode(errors="surrogateescape").split("\0")
    neutral = {"required": "false", "driver": "git merge-file --marker-size=%L %A %O %B"}
    return tuple(
        (name, neutral.get(name.rpartition(".")[2], ""))
        for name in sorted(set(names))
        if _DRIVER.fullmatch(name)
    )


def _work_tree(repo: Path) -> Path | None:
    """Return the user's work tree that contains a folder; None for the store's own."""
    if _bare(repo) is not None:
        return None
    repo = repo.resolve()
    return next((folder for folder in (repo, *repo.parents) if (folder / ".git").is_dir()), None)


def _of_owner(repo: Path, tree: Path | None = None) -> _Settings:
    """Return the settings with which git accepts another user's trusted repository.

    Args:
        tree: the user's work tree; None for a repository of the store.
    """
    bare = _bare(repo)
    places = [tree, tree / ".git"] if tree is not None else []
    places += [repo, bare] if bare is not None else []
    foreign = [place for place in places if place.stat().st_uid not in us()]
    for place in foreign:
        check_owner(place)
    # git compares the work tree's path, or a bare repository's
    return tuple(("safe.directory", str(place.resolve())) for place in places if foreign)


# -- owners --------------------------------------------------------------------------


def check_owner(folder: Path, *, refused: bool = False) -> None:
    """Refuse a folder of another user as git does, unless git's settings trust it.

    Args:
        refused: git itself has refused it.

    Raises:
        StoreError: it is not trusted.
    """
    try:
        owner = folder.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return  # not created yet
    if not refused and (owner in us() or _covered(folder)):
        return
    msg = f"{folder}: belongs to another user (uid {owner}), who could make us run any program"
    remedy = (
        "use a folder of your own (a store: --store DIR); if you trust that user:"
        f" git config --global --add safe.directory {folder}"
    )
    raise StoreError(msg, remedy)


def check_dubious(stderr: bytes) -> None:
    """Raise StoreError if git refused another user's repository."""
    if match := _DUBIOUS.search(stderr):
        check_owner(Path(os.fsdecode(match[1])), refused=True)


def us() -> set[int]:
    """Return the users with accepted folders: under sudo also its caller, as in git."""
    sudo = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return {os.geteuid(), *([int(sudo)] if sudo.isdecimal() else [])}


def _covered(folder: Path) -> bool:
    """Return whether the user's git settings trust a folder of any owner."""
    return any(place == "*" or folder.is_relative_to(place) for place in trusted())


@cache
def trusted() -> tuple[str, ...]:
    """Return the folders of any owner that the user's git settings trust."""
    done = call(
        "git", "config", "--null", "--get-all", "safe.directory", cwd=Path("/"), check=False
    )
    return tuple(filter(None, done.stdout.decode(errors="surrogateescape").split("\0")))
