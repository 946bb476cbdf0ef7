"""git, as plain functions on bare repositories; each flag with its reason.

Users' settings change git's behaviour (``diff.noprefix``, ``format.signOff``, hooks …), so every
call except a network fetch runs without user and system configuration. A fetch uses them for
proxies, certificates and ``url.insteadOf`` mirrors.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.disk import disk_errors
from sparkforge.core.errors import CommandError
from sparkforge.core.gitsafe import clean_env, explained, isolated
from sparkforge.core.run import call

ABSENT = "0" * 40
"""A diff's blob of a missing file."""
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""git has it in every repository."""


def git(
    repo: Path, *args: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run git as ``isolated`` does; return its output without the last newline."""
    data = git_bytes(repo, *args, stdin=stdin, env=env)
    return data.decode(errors="surrogateescape").rstrip("\n")


def git_bytes(
    repo: Path, *args: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> bytes:
    """Like ``git``, with the unchanged output."""
    return isolated(repo, *args, stdin=stdin, env=env).stdout


def attempt(repo: Path, *args: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Like ``git``, for commands that may fail: returns (exit code, complete output)."""
    result = isolated(repo, *args, env=env, check=False)
    return result.returncode, (result.stdout + result.stderr).decode(errors="surrogateescape")


def git_ok(repo: Path, *args: str) -> bool:
    """Return whether a git command succeeds; for queries only."""
    return isolated(repo, *args, check=False).returncode == 0


def head(folder: Path) -> str:
    """Return the commit of the work tree whose top is a folder, or "" if it is none."""
    try:
        top = git(folder, "rev-parse", "--show-toplevel")
        # else it is inside another project's repository
        return git(folder, "rev-parse", "HEAD") if Path(top).samefile(folder) else ""
    except CommandError:
        return ""


def init_bare(repo: Path) -> None:
    """Create a bare repository, or complete one that a killed git left; the lock is held."""
    if (repo / "objects" / "info").is_dir():
        return  # git makes it last; a second time it would turn off our work trees
    with disk_errors(repo):
        repo.parent.mkdir(parents=True, exist_ok=True)
        # no template: it would copy sample hooks into every repository
        options = ("--quiet", "--bare", "--template=", "--initial-branch=main")
        call("git", "init", *options, repo, env=clean_env())


def tidy(repo: Path) -> None:
    """Remove the remains of a killed git, which stop the next; the caller has the lock."""
    left = ["*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "objects/??/tmp_obj_*"]
    for pattern in (*left, "fast_import_crash_*") if repo.is_dir() else ():
        for path in repo.glob(pattern):
            path.unlink(missing_ok=True)


def has_commit(repo: Path, commit: str) -> bool:
    """Return whether a commit is in the repository, with its tree."""
    return (repo / "HEAD").exists() and git_ok(repo, "cat-file", "-e", f"{commit}^{{tree}}")


def ref_commit(repo: Path, ref: str) -> str | None:
    """Return the commit of a ref, or None."""
    if not (repo / "HEAD").exists():
        return None
    words = ("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    return isolated(repo, *words, check=False).stdout.decode().strip() or None


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
    with explained(repo):
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
    with explained(repo), tempfile.TemporaryFile(dir=repo.parent) as out:
        out.write(head.encode() + text + b"\ndeleteall\n")
        for file in files:
            path = file.path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            head = f'M {file.mode} inline "{path}"\ndata {len(file.data)}\n'
            out.write(head.encode(errors="surrogateescape"))  # names need not be UTF-8
            out.write(file.data + b"\n")
        out.write(b"done\n")
        out.seek(0)
        call("git", "-C", repo, "fast-import", "--quiet", "--done", stdin=out, env=clean_env())
    commit = ref_commit(repo, ref)
    assert commit is not None
    return commit


_GLOB, _ESCAPED = re.compile(r"([*?\[\]!\\# ])"), r"\\\1"


@contextmanager
def sparse_worktree(repo: Path, where: Path, commit: str, paths: Iterable[str]) -> Iterator[Path]:
    """Check out only the named paths of a commit; the index has the whole tree.

    ``git am`` only needs the patched files: milliseconds instead of seconds for thousands of files.
    """
    # a slash anchors at the top
    patterns = "".join(f"/{re.sub(_GLOB, _ESCAPED, path)}\n" for path in sorted(set(paths)))
    data = patterns.encode(errors="surrogateescape")
    git(repo, "worktree", "prune")  # entries of killed runs, whose folders were removed
    git(repo, "worktree", "add", "--quiet", "--no-checkout", "--detach", str(where), commit)
    try:
        # --no-cone: patterns are single files
        git(where, "sparse-checkout", "set", "--no-cone", "--stdin", stdin=data)
        git(where, "read-tree", "-mu", "HEAD")
        yield where
    finally:
        git(repo, "worktree", "remove", "--force", str(where))


@dataclass(frozen=True)
class Change:
    """A changed file between two trees; a blob is ABSENT on the side that lacks the file."""

    status: str
    path: str
    old_blob: str
    new_blob: str
    old_mode: str
    new_mode: str


def changes(repo: Path, old: str, new: str, *paths: str) -> list[Change]:
    """Return the differences of two commits or trees, without rename detection."""
    # --no-renames: an overlay needs "removed" and "added", not git's guess that it is a move
    how = ("--literal-pathspecs", "diff-tree", "-r", "-z", "--no-renames", "--full-index")
    fields = git(repo, *how, old, new, "--", *paths).split("\0")
    result = []
    for meta, path in zip(fields[0::2], fields[1::2], strict=False):
        old_mode, new_mode, old_blob, new_blob, status = meta.lstrip(":").split(" ")
        result.append(Change(status, path, old_blob, new_blob, old_mode, new_mode))
    return result


def unpack(repo: Path, tree: str, paths: Iterable[str], where: Path) -> None:
    """Write files of a tree (or commit, or COMMIT:FOLDER) below some paths into a folder."""
    where.mkdir(parents=True, exist_ok=True)
    # tar.umask: git's default lets the group write
    how = ("-c", "tar.umask=0022", "archive", "--format=tar")
    packed = git_bytes(repo, *how, tree, "--", *paths)
    # Python before 3.11.4 (Debian 12 has 3.11.2) has no safe way: a link may lead out of the folder
    call("tar", "-x", "--no-same-owner", "--preserve-permissions", cwd=where, stdin=packed)


def blobs_at(repo: Path, commit: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the blob id of each path that exists in a commit."""
    wanted = sorted(set(paths))
    found = changes(repo, EMPTY_TREE, commit, *wanted) if wanted else []
    return {change.path: change.new_blob for change in found}


def clone_at(
    repo: Path, where: Path, commit: str, finish: Callable[[Path], None] | None = None
) -> None:
    """Create a clone with a commit on its own branch, and call ``finish`` with it."""
    with disk_errors(where):
        where.mkdir(parents=True)
    try:
        # --no-hardlinks: changes of the user in the clone must not reach the store
        clone = ("git", "clone", "--quiet", "--no-checkout", "--no-hardlinks", "--template=")
        call(*clone, repo, where, env=clean_env())
        # a clone copies branches and tags only; the series' commit has a ref of its own
        git(where, "fetch", "--quiet", str(repo), commit)
        git(where, "checkout", "--quiet", "-B", "sparkforge", commit)
        if finish is not None:
            finish(where)
    except BaseException:
        shutil.rmtree(where, ignore_errors=True)
        raise
