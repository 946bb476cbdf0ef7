"""Patches from outside → commits of a series: applied, their messages brought into our form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git
from sparkforge.core.errors import CommandError, SeriesError, UsageError
from sparkforge.series.exporting import Chain
from sparkforge.series.lint import FILL_IN, TRAILERS
from sparkforge.series.patchfile import NATIVE, parted
from sparkforge.series.series import AM, Patched, Series
from sparkforge.store.store import Store

_TEMPLATE = {
    "Upstream-Status": "Pending | Submitted REF | Backport REF | Inappropriate REASON",
    "Drop-when": "vllm>=VERSION | test; which upstream change makes it unnecessary",
    "Risk": "build | dispatch | numerics",
    "Test": "tests/patches/test_x.py::test_y",
}
_WHY = (
    f"{FILL_IN} why the patch exists (the first sentence or two become the Why of\n"
    "docs/patches.md), what it costs, and how it was checked."
)
_BY_HAND = (
    "in a work tree (build.py patches apply): git am --3way FILE, then build.py patches export"
)


@dataclass(frozen=True)
class Words:
    """Additions to patches from outside: trailers and a subject instead of their own, and the
    reason in front of their message."""

    trailers: Mapping[str, str]
    subject: str | None = None
    why: str | None = None


def template(subject: str, trailers: Mapping[str, str]) -> str:
    """Return a template of a message."""
    values = {key: trailers.get(key) or f"{FILL_IN} {_TEMPLATE[key]}" for key in TRAILERS}
    if native := trailers.get(NATIVE):
        values[NATIVE] = native
    return "\n\n".join((subject, _WHY, _block(values.items()))) + "\n"


def _block(trailers: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in trailers)


def chain(
    store: Store, series: Series, patched: Patched, files: Sequence[Path], words: Words
) -> Chain:
    """Return the series' commits, and behind them those of files: mails with patches.

    UsageError: a required value of a patch is missing. SeriesError: a file is not a patch, or does
    not apply there.
    """
    source = patched.source
    paths = [path for file in files for path in _paths(file)]
    paths += [entry.path for patch in series.patches for entry in patch.entries]
    with (
        store.temporary("import") as work,
        git.sparse_worktree(source.repo, work / "tree", patched.commit, paths) as tree,
    ):
        fresh = [one for file in files for one in _applied(tree, file)]
        if words.subject is not None and len(fresh) > 1:
            msg = f"--subject is for one patch, but there are {len(fresh)}"
            raise UsageError(msg, "import them one by one")
        tip = patched.commit
        for commit in fresh:
            tip = _rewritten(tree, commit, tip, words)
        return Chain(source, tip, {})


def _paths(file: Path) -> list[str]:
    """Return the paths that a patch touches, on both sides of a rename."""
    try:
        how = ("apply", "--numstat", "-z", str(file.resolve()))
        nowhere = {"GIT_CEILING_DIRECTORIES": "/", "GIT_DIR": "/dev/null"}
        listing = git.git(Path(), *how, env=nowhere)
    except CommandError as error:
        msg = f"{file}: not a patch that git can read:\n{error}"
        raise SeriesError(msg, "create it with git format-patch, or download the .patch") from None
    return [field.rpartition("\t")[2] for field in listing.split("\0") if field]


def _applied(tree: Path, file: Path) -> list[str]:
    """Apply one file in a worktree; return its commits."""
    before = git.git(tree, "rev-parse", "HEAD")
    try:
        git.git(tree, *AM, "--3way", str(file.resolve()))
    except CommandError as error:
        raise SeriesError(f"{file}: does not apply:\n{error}", _BY_HAND) from None
    fresh = git.git(tree, "rev-list", "--reverse", f"{before}..HEAD").split()
    if not fresh:
        raise SeriesError(f"{file}: contains no patch", "create it with git format-patch")
    return fresh


def _rewritten(tree: Path, commit: str, parent: str, words: Words) -> str:
    """Repeat the commit on a parent, with its message in our form."""
    name, address, date, message = git.git(
        tree, "show", "-s", "--date=raw", "--format=%an%x00%ae%x00%ad%x00%B", commit
    ).split("\0", 3)
    subject, _, body = message.strip().partition("\n")
    body, trailers = parted(body)
    present = dict(trailers)
    ours = {key: words.trailers.get(key) or present.get(key, "") for key in TRAILERS}
    if missing := [key for key, value in ours.items() if not value]:
        options = " ".join(f"--{key.lower()} TEXT" for key in missing)
        raise UsageError(f"{subject!r}: no trailer {', '.join(missing)}", f"add {options}")
    if native := words.trailers.get(NATIVE) or present.get(NATIVE):
        ours[NATIVE] = native
    # of these there may be several: two Signed-off-by
    foreign = _block((key, value) for key, value in trailers if key not in ours)
    parts = [words.subject or subject, words.why, body, foreign, _block(ours.items())]
    text = "\n\n".join(part for part in parts if part) + "\n"
    author = {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": address, "GIT_AUTHOR_DATE": date}
    how = ("commit-tree", f"{commit}^{{tree}}", "-p", parent, "-F", "-")
    return git.git(tree, *how, stdin=text.encode(errors="surrogateescape"), env=author)
