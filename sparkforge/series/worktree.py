"""Work trees: clones with each patch of a series as a commit, to edit with plain git.

A work tree stores its origin: the upstream, its pinned commit (``refs/sparkforge/base``), and the
series (``sparkforge.series``).
"""

from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, SeriesError, UsageError
from sparkforge.series.series import Patched, Series

_BASE_REF = "refs/sparkforge/base"
_ALONE = {"GIT_NO_REPLACE_OBJECTS": "1"}


@dataclass(frozen=True)
class WorkTree:
    """A work tree and its origin."""

    folder: Path
    upstream: str
    base: str
    series: tuple[str, ...]
    """The sha256 of the original series, and of those that were exported."""

    def git(self, *args: str) -> str:
        """Run git in it, isolated from the user's settings but not from the work tree's own."""
        return git.git(self.folder, *args, env=_ALONE)

    @property
    def head(self) -> str:
        return self.git("rev-parse", "--verify", "HEAD^{commit}")

    @property
    def objects(self) -> dict[str, str]:
        """Variables for git in another repository, so that it finds this work tree's commits."""
        path = self.git("rev-parse", "--path-format=absolute", "--git-path", "objects")
        # a colon would end the path, so git takes it quoted
        quoted = path.replace("\\", "\\\\").replace('"', '\\"')
        return {"GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"', **_ALONE}


def make(patched: Patched, series: Series, folder: Path) -> WorkTree:
    """Create a work tree of a series; StoreError: the folder exists or cannot be created."""
    git.clone_at(patched.source.repo, folder, patched.commit)
    git.git(folder, "config", "sparkforge.upstream", series.upstream)
    git.git(folder, "config", "sparkforge.series", series.sha256)
    for key in ("core.autocrlf", "core.safecrlf"):  # the user's would change files
        git.git(folder, "config", key, "false")
    git.git(folder, "update-ref", _BASE_REF, patched.source.commit)
    return WorkTree(folder, series.upstream, patched.source.commit, (series.sha256,))


def read(folder: Path) -> WorkTree:
    """Return the origin of a work tree, or of a folder inside; UsageError: ``make`` made none."""
    try:
        found = git.git(folder, "rev-parse", "--show-toplevel", f"{_BASE_REF}^{{commit}}")
        path, _, base = found.rpartition("\n")
        settings = git.git(Path(path), "config", "--null", "--get-regexp", r"^sparkforge\.")
        pairs = [entry.split("\n", 1) for entry in settings.split("\0") if entry]
        (upstream,) = (value for key, value in pairs if key == "sparkforge.upstream")
    except (CommandError, ValueError):
        msg = f"{folder}: not a work tree of a series"
        raise UsageError(msg, "create one: build.py patches apply UPSTREAM DIR") from None
    series = tuple(value for key, value in pairs if key == "sparkforge.series")
    return WorkTree(Path(path), upstream, base, series)


def settled(tree: WorkTree) -> list[str]:
    """Return the untracked files; SeriesError: other changes, or no line of commits to export."""
    folder = Path(tree.git("rev-parse", "--absolute-git-dir"))
    if any((folder / name).exists() for name in ("rebase-merge", "rebase-apply", "MERGE_HEAD")):
        msg = f"{tree.folder}: a rebase or merge is in progress"
        raise SeriesError(msg, "finish it: git status says how")
    words = ("status", "--porcelain", "--untracked-files=all")
    lines = tree.git("-c", "core.quotePath=true", *words).splitlines()
    if changed := [line[3:] for line in lines if not line.startswith("??")]:
        msg = f"{tree.folder}: uncommitted changes: {', '.join(changed[:5])}"
        raise SeriesError(msg, "commit them (git commit --amend), or stash them (git stash)")
    try:
        apart = tree.git("rev-list", "--merges", f"{tree.base}..HEAD")
        tree.git("merge-base", "--is-ancestor", tree.base, "HEAD")
    except CommandError as error:
        apart = str(error)
    if apart:
        msg = f"{tree.folder}: no line of commits without merges from the pinned {tree.base}"
        hint = f"git rebase {tree.base[:12]}; or git checkout sparkforge, the series' branch"
        raise SeriesError(f"{msg}: {apart}", hint)
    return [line[3:] for line in lines if line.startswith("??")]


def exported(tree: WorkTree, series: str) -> None:
    """Record that its commits are now this series (its sha256), too."""
    if series not in tree.series:
        tree.git("config", "--add", "sparkforge.series", series)
