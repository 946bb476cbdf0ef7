"""The git repository of a rebase: a separate one, which the user may change freely.

It borrows the store's objects (``alternates``) and keeps its own index, files and rerere cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git, gitsafe

_CONFIG = {
    "rerere.enabled": "true",  # remember resolutions …
    "rerere.autoUpdate": "true",  # … and stage the files that they resolve
    "merge.conflictStyle": "diff3",  # a conflict shows the common base
    "merge.directoryRenames": "true",  # a new file goes where its folder went
    "merge.renameLimit": "20000",  # vLLM's releases move hundreds of files at once
    "diff.renameLimit": "20000",
    "core.autocrlf": "false",
    "gc.auto": "0",
    "advice.detachedHead": "false",
    "user.name": gitsafe.COMMITTER,
    "user.email": gitsafe.COMMITTER_EMAIL,
    "commit.gpgSign": "false",
}


@dataclass(frozen=True)
class Unmerged:
    """One file in conflict: its blobs by stage (1 base, 2 the new release, 3 the patch)."""

    path: str
    blobs: dict[int, str]


class Workspace:
    """A working tree at some commit of a borrowed repository."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, path: Path, repo: Path, commit: str, only: Iterable[str] | None) -> Workspace:
        """Make one, with a commit checked out.

        Args:
            only: check out no more than these files; None: all.
        """
        path.mkdir(parents=True)
        git.git(path, "init", "--quiet", "--template=", "--initial-branch=main", ".")
        info = path / ".git" / "objects" / "info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "alternates").write_text(f"{repo.resolve() / 'objects'}\n")
        config = path / ".git" / "config"
        with config.open("a") as file:
            for key, value in _CONFIG.items():
                section, _, name = key.partition(".")
                file.write(f"[{section}]\n\t{name} = {value}\n")
        (path / ".git" / "rr-cache").mkdir()
        work = cls(path)
        if only is not None:
            work._sparse(only)
        work.reset(commit)
        return work

    def _sparse(self, only: Iterable[str]) -> None:
        with (self.path / ".git" / "config").open("a") as file:
            file.write("[core]\n\tsparseCheckout = true\n\tsparseCheckoutCone = false\n")
        patterns = self.path / ".git" / "info" / "sparse-checkout"
        patterns.parent.mkdir(exist_ok=True)
        patterns.write_bytes(git.sparse_patterns(only))

    def git(self, *args: str, env: dict[str, str] | None = None) -> str:
        """Run git in it, isolated."""
        return git.git(self.path, *args, env=env)

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")

    def reset(self, commit: str) -> None:
        """Abort the operation in progress and check out a commit."""
        git.tidy(self.path / ".git")  # locks of a git that was killed
        for name in ("CHERRY_PICK_HEAD", "REVERT_HEAD", "MERGE_MSG", "MERGE_RR", "AUTO_MERGE"):
            (self.path / ".git" / name).unlink(missing_ok=True)
        self.git("update-ref", "--no-deref", "HEAD", commit)
        self.git("read-tree", "--reset", "-u", commit)
        self.git("clean", "-ffdxq")

    def pick(self, commit: str, *, revert: bool = False) -> tuple[bool, str]:
        """Merge a commit's change into index and files; returns (no conflict, git's output).

        Args:
            revert: merge the change backwards, in place of the change.
        """
        command = "revert" if revert else "cherry-pick"
        code, output = git.attempt(self.path, command, "--no-commit", commit)
        if code not in (0, 1):
            # not a conflict: run it again for git's error
            self.git(command, "--no-commit", commit)
        return code == 0, output

    def merged(self, tip: str, commit: str, *, revert: bool = False) -> str | None:
        """Return the tree of a commit with another's change merged; None where they conflict.

        The workspace stands on ``tip`` then.
        """
        self.reset(tip)
        merged, _ = self.pick(commit, revert=revert)
        tree = self.write_tree() if merged else None
        self.reset(tip)
        return tree

    def tree_of(self, commit: str) -> str:
        """Return a commit's tree."""
        return self.git("rev-parse", f"{commit}^{{tree}}")

    def borrow(self, repo: Path) -> None:
        """Borrow the objects of another repository, too."""
        objects = git.git(repo, "rev-parse", "--path-format=absolute", "--git-path", "objects")
        with (self.path / ".git" / "objects" / "info" / "alternates").open("a") as file:
            file.write(f"{objects}\n")

    def unmerged(self) -> list[Unmerged]:
        """Return the files in conflict."""
        files: dict[str, Unmerged] = {}
        for line in filter(None, self.git("ls-files", "-u", "-z").split("\0")):
            meta, path = line.split("\t", 1)
            _, blob, stage = meta.split(" ")
            files.setdefault(path, Unmerged(path, {})).blobs[int(stage)] = blob
        return list(files.values())

    def write_tree(self) -> str:
        """Write the index as a tree."""
        return self.git("write-tree")

    def commit_like(
        self, original: str, tree: str, parent: str, message_of: str | None = None
    ) -> str:
        """Commit a tree with another commit's author and date; nothing is moved.

        Args:
            message_of: the commit whose message it gets; None: the same one's.
        """
        fields = self.git("show", "-s", "--format=%an%x00%ae%x00%ad", "--date=raw", original)
        name, email, date = fields.split("\0")
        env = {
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": email,
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
        }
        message = git.git_bytes(self.path, "show", "-s", "--format=%B", message_of or original)
        return git.git(
            self.path, "commit-tree", tree, "-p", parent, "-F", "-", stdin=message, env=env
        )

    def diff(self, old: str, new: str) -> bytes:
        """Return the canonical diff of two commits or trees."""
        return git.diff(self.path, old, new)

    @contextmanager
    def temporary(self, hint: str) -> Iterator[Path]:
        """Make a fresh folder outside of any repository."""
        with tempfile.TemporaryDirectory(prefix=f"{hint}-", dir=self.path.resolve().parent) as made:
            yield Path(made)
