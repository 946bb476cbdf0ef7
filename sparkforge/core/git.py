"""git, as plain functions on bare repositories; each flag with its reason.

Users' settings change git's output (``diff.noprefix``, ``format.signOff`` …), and a repository can
name programs in its own: hooks, filters, merge drivers, a file system monitor. Every call runs
without both, except that a network fetch uses the user's proxies, certificates and mirrors.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from sparkforge.core.errors import CommandError, StoreError
from sparkforge.core.run import call, failure

ABSENT = "0" * 40
"""A diff's blob of a missing file."""
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git has it in every repository."""
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
# change git's output (GIT_DIFF_OPTS …)
_KEPT = (
    *("GIT_SSH", "GIT_SSL_", "GIT_HTTP_", "GIT_PROXY_", "GIT_CURL_", "GIT_ASKPASS", "GIT_TRACE"),
    *("GIT_CONFIG_", "GIT_ALLOW_PROTOCOL", "GIT_EXEC_PATH"),
)
_DRIVER = re.compile(r"(filter\.[\s\S]*\.(clean|smudge|process|required)|merge\.[\s\S]*\.driver)")
_NEUTRAL = {"required": "false", "driver": "git merge-file --marker-size=%L %A %O %B"}


def unbind() -> None:
    """Remove the user's GIT_* variables, except those that a network fetch may need."""
    for name in list(os.environ):
        if name.startswith("GIT_") and not name.startswith(_KEPT):
            del os.environ[name]


@cache
def trusted_folders() -> tuple[str, ...]:
    """Return the folders of any owner that the user's git settings trust."""
    words = ("git", "config", "--null", "--get-all", "safe.directory")
    listed = call(*words, cwd=Path("/"), check=False).stdout.decode(errors="surrogateescape")
    return tuple(listed.split("\0")[:-1])


def check_owner(folder: Path) -> None:
    """Refuse another user's folder as git does, with StoreError, unless git's settings trust it."""
    if not folder.is_dir():
        return  # not created yet
    # under sudo also its caller's, as in git
    ours = (os.geteuid(), int(os.environ.get("SUDO_UID", "0")) if os.geteuid() == 0 else -1)
    if folder.stat().st_uid not in ours and not {"*", str(folder)} & set(trusted_folders()):
        raise _foreign(folder)


def _foreign(folder: Path) -> StoreError:
    what = f"{folder}: belongs to another user, who could make us run any program"
    own = "use a folder of your own (a store: --store DIR); if you trust that user:"
    return StoreError(what, f"{own} git config --global --add safe.directory {folder}")


def _clean_env(settings: tuple[tuple[str, str], ...] = ()) -> dict[str, str]:
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
        "GIT_NO_REPLACE_OBJECTS": "1",  # refs/replace would give other bytes under the same id
        "GIT_DIFF_OPTS": "",
        "GIT_DEFAULT_HASH": "sha1",
        "GIT_TERMINAL_PROMPT": "0",  # fail instead of asking for a password
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_COMMITTER_NAME": COMMITTER,
        "GIT_COMMITTER_EMAIL": COMMITTER_EMAIL,
    }


@cache
def _without_drivers(repo: Path) -> tuple[tuple[str, str], ...]:
    """Return settings that disable the programs in a repository's own settings.

    A repository chooses the names of its filters. git lists them, and runs none for that.
    """
    if (repo / "objects").is_dir():
        return ()  # the store's own bare repositories have none
    words = ("git", "-C", repo, "config", "--null", "--name-only", "--list")
    listed = call(*words, env=_clean_env(), check=False).stdout.decode(errors="surrogateescape")
    drivers = filter(_DRIVER.fullmatch, sorted(set(listed.split("\0"))))
    return tuple((name, _NEUTRAL.get(name.rpartition(".")[2], "")) for name in drivers)


def isolated(
    repo: Path,
    *args: str,
    stdin: bytes | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run git on a repository, without the user's settings and the repository's programs.

    CommandError: git ended with an error (only with ``check``). StoreError: the repository is
    another user's, or its disk is full.
    """
    variables = {**_clean_env(_without_drivers(repo)), **(env or {})}
    done = call("git", "-C", repo, *args, stdin=stdin, env=variables, check=False)
    if done.returncode and b"detected dubious ownership" in done.stderr:
        raise _foreign(repo)
    if check and done.returncode:
        error = failure(done)
        error.remedy = _fetch_again(repo)
        raise error
    return done


def _fetch_again(repo: Path) -> str:
    """Return the hint for git's failure in a bare repository, which only the store has."""
    hint = f"if git calls it damaged, delete {repo}: the next run fetches it again"
    return hint if (repo / "objects").is_dir() else ""


def git(
    repo: Path, *args: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run git as ``isolated`` does; return its output without the last newline."""
    data = isolated(repo, *args, stdin=stdin, env=env).stdout
    return data.decode(errors="surrogateescape").rstrip("\n")


def attempt(repo: Path, *args: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Like ``git``, for commands that may fail: returns (exit code, complete output)."""
    result = isolated(repo, *args, env=env, check=False)
    return result.returncode, (result.stdout + result.stderr).decode(errors="surrogateescape")


def head(folder: Path) -> str:
    """Return the commit of the work tree whose top is a folder, or "" if it is none."""
    try:
        top = git(folder, "rev-parse", "--show-toplevel")
        # else it is inside another project's repository
        return git(folder, "rev-parse", "HEAD") if Path(top).samefile(folder) else ""
    except CommandError:
        return ""


def has_commit(repo: Path, commit: str) -> bool:
    """Return whether a commit is in the repository, with its tree."""
    words = ("cat-file", "-e", f"{commit}^{{tree}}")
    return (repo / "HEAD").exists() and attempt(repo, *words)[0] == 0


def ref_commit(repo: Path, ref: str) -> str | None:
    """Return the commit of a ref, or None."""
    if not (repo / "HEAD").exists():
        return None
    words = ("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    return isolated(repo, *words, check=False).stdout.decode().strip() or None


@dataclass(frozen=True)
class Change:
    """A changed file between two trees, in git's order; a missing file's blob is ABSENT."""

    old_mode: str
    new_mode: str
    old_blob: str
    new_blob: str
    status: str
    path: str


def changes(repo: Path, old: str, new: str, *paths: str) -> list[Change]:
    """Return the differences of two commits or trees, without rename detection."""
    # --no-renames: an overlay needs "removed" and "added", not git's guess that it is a move
    how = ("--literal-pathspecs", "diff-tree", "-r", "-z", "--no-renames", "--full-index")
    fields = git(repo, *how, old, new, "--", *paths).split("\0")
    pairs = zip(fields[0::2], fields[1::2], strict=False)
    return [Change(*f"{meta.lstrip(':')} {path}".split(" ", 5)) for meta, path in pairs]


def blobs_at(repo: Path, commit: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the blob id of each path that exists in a commit."""
    wanted = sorted(set(paths))
    found = changes(repo, EMPTY_TREE, commit, *wanted) if wanted else []
    return {change.path: change.new_blob for change in found}


@contextmanager
def reading(repo: Path) -> Iterator[Callable[[str], bytes]]:
    """Yield a function that returns an object's content by its name; for one thread.

    GitPython talks to one ``git cat-file --batch``. Its import takes as long as 15 to 20 calls of
    git (0.1 s), so only commands that read many objects use it.
    """
    git(repo, "rev-parse")  # an error if git refuses it, or there is none
    from git import Git

    process = Git()
    process.set_persistent_git_options(C=str(repo))
    process.update_environment(**_clean_env(_without_drivers(repo)))

    def blob(name: str) -> bytes:
        try:
            _, _, size, data = process.get_object_data(name)
            if len(data) != size:  # git ends within a damaged object; GitPython reports nothing
                raise ValueError("damaged")
        except (ValueError, OSError) as error:
            what = f"git cat-file --batch in {repo}: {name}: {error}"
            raise CommandError(what, _fetch_again(repo)) from error
        return data

    try:
        yield blob
    finally:
        process.clear_cache()  # ends it


def unpack(repo: Path, tree: str, paths: Iterable[str], where: Path) -> None:
    """Write files of a tree (or commit, or COMMIT:FOLDER) below some paths into a folder."""
    where.mkdir(parents=True, exist_ok=True)
    # tar.umask: git's default lets the group write
    how = ("-c", "tar.umask=0022", "archive", "--format=tar")
    packed = isolated(repo, *how, tree, "--", *paths).stdout
    # Python before 3.11.4 (Debian 12 has 3.11.2) has no safe way: a link may lead out of the folder
    call("tar", "-x", "--no-same-owner", "--preserve-permissions", cwd=where, stdin=packed)


def init_bare(repo: Path) -> None:
    """Create a bare repository, or complete one that a killed git left; the lock is held."""
    if (repo / "objects" / "info").is_dir():
        return  # git makes it last; a second time it would turn off our work trees
    repo.parent.mkdir(parents=True, exist_ok=True)
    # no template: it would copy sample hooks into every repository
    options = ("--quiet", "--bare", "--template=", "--initial-branch=main")
    call("git", "init", *options, repo, env=_clean_env())


def tidy(repo: Path) -> None:
    """Remove the remains of a killed git, which stop the next; the caller has the lock."""
    left = ["*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "objects/??/tmp_obj_*"]
    for pattern in (*left, "fast_import_crash_*"):
        for path in repo.glob(pattern):
            path.unlink(missing_ok=True)


def remote_tags(url: str, *patterns: str) -> dict[str, str]:
    """Return the tags of a remote with their (peeled) commits; without ``patterns``, all."""
    words = ("git", "ls-remote", "--tags", "--", url, *patterns)
    listing = call(*words, env={"GIT_TERMINAL_PROMPT": "0"}).stdout.decode()
    pairs = sorted(line.split("\t")[::-1] for line in listing.splitlines())
    # TAG^{} follows TAG
    return {ref.removeprefix("refs/tags/").removesuffix("^{}"): commit for ref, commit in pairs}


def fetch_commit(repo: Path, url: str, commit: str) -> None:
    """Fetch one commit and its tree, nothing of its history, with the user's settings."""
    # version 1 of the protocol serves advertised commits only
    words = ("git", "-C", repo, "-c", "protocol.version=2", "fetch", "--depth=1")
    # tags may move, only the commit counts; maintenance would continue in the background
    options = ("--no-tags", "--no-auto-maintenance", "--no-recurse-submodules")
    call(*words, *options, "--", url, commit, env={"GIT_TERMINAL_PROMPT": "0"}, stream=True)


@dataclass(frozen=True)
class TreeFile:
    """One file of a tree to be imported: path with forward slashes, git mode, content."""

    path: str
    mode: str
    data: bytes


def import_tree(
    repo: Path, files: Iterable[TreeFile], *, ref: str, message: str, author: str, epoch: int
) -> str:
    """Point a ref at a parentless commit, which depends on the arguments alone; return it."""
    stamp, text = f"{author} {epoch} +0000", message.encode()
    head = f"commit {ref}\nauthor {stamp}\ncommitter {stamp}\ndata {len(text)}\n"
    with tempfile.TemporaryFile(dir=repo.parent) as out:
        out.write(head.encode() + text + b"\ndeleteall\n")
        for file in files:
            path = file.path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            head = f'M {file.mode} inline "{path}"\ndata {len(file.data)}\n'
            out.write(head.encode(errors="surrogateescape"))  # names need not be UTF-8
            out.write(file.data + b"\n")
        out.write(b"done\n")
        out.seek(0)
        isolated(repo, "fast-import", "--quiet", "--done", stdin=out)
    return git(repo, "rev-parse", ref)


@contextmanager
def sparse_worktree(repo: Path, where: Path, commit: str, paths: Iterable[str]) -> Iterator[Path]:
    """Check out only the named paths of a commit; the index has the whole tree.

    ``git am`` only needs the patched files: milliseconds instead of seconds for thousands of files.
    """
    # a slash anchors at the top; a backslash escapes what is special in a pattern
    patterns = (re.sub(r"([*?\[\]!\\# ])", r"\\\1", path) for path in sorted(set(paths)))
    data = "".join(f"/{pattern}\n" for pattern in patterns).encode(errors="surrogateescape")
    git(repo, "worktree", "prune")  # entries of killed runs, whose folders were removed
    git(repo, "worktree", "add", "--quiet", "--no-checkout", "--detach", str(where), commit)
    try:
        # --no-cone: patterns are single files
        git(where, "sparse-checkout", "set", "--no-cone", "--stdin", stdin=data)
        git(where, "read-tree", "-mu", "HEAD")
        yield where
    finally:
        git(repo, "worktree", "remove", "--force", str(where))


def clone_at(repo: Path, where: Path, commit: str) -> None:
    """Create a clone with a commit on its own branch."""
    # --no-hardlinks: changes of the user in the clone must not reach the store
    clone = ("git", "clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template=")
    call(*clone, repo, where, env=_clean_env())
    # a clone copies branches and tags only; the series' commit has a ref of its own
    git(where, "fetch", "--quiet", str(repo), commit)
    git(where, "checkout", "--quiet", "-B", "sparkforge", commit)
