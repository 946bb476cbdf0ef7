"""Series ↔ commits: read, check, apply, export.

A patch that is not exact is refused: once it is applied, git must export its very bytes. They name
each file's blobs before and after (``--full-index``), so there is neither fuzz nor offset.
"""

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core import git, plain
from sparkforge.core.errors import CommandError, IntegrityError, SeriesError
from sparkforge.pins.pins import Provider, Upstream
from sparkforge.series.patchfile import Patch, check_shadows, read_patch, slug
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store, code_of

# With clean_env(), `git format-patch` gives the same bytes on every machine:
EXPORT_FLAGS = (
    "--zero-commit",  # no commit SHA in the first line: it changes with every rebase
    "--no-signature",  # no git version at the end
    "--full-index",  # whole blob ids: the exactness check reads them
    "--no-stat",  # a summary that changes with the terminal's width
    "--no-numbered",  # [PATCH 3/7] changes with every insertion
    "--keep-subject",  # no [PATCH] at all
)
AM = (
    "am",
    "--quiet",
    "--keep-non-patch",  # subjects may start with [something]
    "--keep-cr",  # files with CRLF line ends stay as they are
    "--no-gpg-sign",
)
"""Applies patches as commits."""
RECORD: Mapping[Provider, str] = {"release": "pins record", "git": "pins record --source git"}
"""The command that records the result of a series for each kind of source."""


@dataclass(frozen=True)
class Series:
    """The ordered patches of one upstream."""

    upstream: str
    folder: Path
    patches: tuple[Patch, ...] = ()

    @property
    def sha256(self) -> str:
        """One digest over names and contents in order."""
        text = "".join(f"{patch.sha256}  {patch.name}\n" for patch in self.patches)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Patched:
    """A source with its series applied; ``touched``: the last patch of each path it changes."""

    source: Source
    commit: str
    tree: str
    touched: Mapping[str, str] = field(default_factory=dict)


def read(folder: Path) -> Series:
    """Read ``folder/series`` and its patches; no such file: an empty series."""
    listing = folder / "series"
    try:
        lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise SeriesError(f"{listing}: cannot read it: {error}", "restore it from git") from None
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    files = {path.name for path in folder.glob("*.patch") if path.is_file()}
    twice = {name for name in names if names.count(name) > 1}
    problems = [f"{listing}: {name} is listed twice" for name in sorted(twice)]
    problems += [f"{listing}: {name}: no such file" for name in names if name not in files]
    problems += [f"{folder / name}: not listed in series" for name in sorted(files - set(names))]
    if problems:
        raise SeriesError("\n".join(map(plain.escaped, problems)))
    return Series(folder.name, folder, tuple(read_patch(folder / name) for name in names))


def check_emptied(series: Series, upstream: Upstream) -> None:
    """Refuse an upstream whose record says patched while its series is empty: IntegrityError."""
    if not series.patches and upstream.patched:
        msg = f"{series.folder}: no patches, but pins.yaml records a patched tree"
        remedy = f"restore the series, or remove upstreams.{series.upstream}.patched from pins.yaml"
        raise IntegrityError(msg, remedy)  # it would be built unpatched, under the patched name


def apply(store: Store, series: Series, source: Source, *, again: bool = False) -> Patched:
    """Apply the series as commits on the source; with ``again`` also one that is there already.

    SeriesError: a patch does not apply exactly, or is not in canonical form.
    """
    if not series.patches:
        return Patched(source, source.commit, source.tree)
    touched = {entry.path: patch.name for patch in series.patches for entry in patch.entries}
    names = (f"{_ref(series, source)}^{{commit}}", f"{_ref(series, source)}^{{tree}}")
    code, ids = git.attempt(source.repo, "rev-parse", "--quiet", *names)
    if code or again:
        _apply(store, series, source, touched)
        ids = git.git(source.repo, "rev-parse", *names)
    commit, tree = ids.split()
    return Patched(source, commit, tree, touched)


def _apply(store: Store, series: Series, source: Source, paths: Collection[str]) -> None:
    """Apply the series, and point a ref at its last commit."""
    with (
        writing(store, source),
        store.temporary("series") as work,
        git.sparse_worktree(source.repo, work / "tree", source.commit, paths) as tree,
    ):
        try:
            # --no-3way: an exact patch needs no merge; the date: no clock in the commit
            options = ("--no-3way", "--committer-date-is-author-date")
            git.git(tree, *AM, *options, *(str(patch.path.resolve()) for patch in series.patches))
        except CommandError as error:
            msg = f"{series.folder}: does not apply to {source.origin}: git am failed:\n{error}"
            raise SeriesError(msg, _remedy(source)) from error
        commit = git.git(tree, "rev-parse", "HEAD")
        exported = export(source.repo, source.commit, commit)
        for patch, (_, data) in zip(series.patches, exported, strict=True):
            if patch.path.read_bytes() != data:
                msg = f"{patch.path}: applies to {source.origin}, but an export would change it"
                raise SeriesError(f"{msg}: not exact, or not in canonical form", _remedy(source))
        changed = git.changes(source.repo, source.commit, commit)
        new = {change.path for change in changed if change.old_blob == git.ABSENT}
        names = git.git(source.repo, "ls-tree", "-r", "-z", "--name-only", commit).split("\0")
        check_shadows(new, names, str(series.folder))
        # git keeps a worktree's commits only while something points at them
        git.git(source.repo, "update-ref", _ref(series, source), commit)


@contextmanager
def writing(store: Store, source: Source) -> Iterator[None]:
    """Lock a source's repository for writing, without the remains of a killed git."""
    with store.lock(f"git-{source.upstream}"):
        git.tidy(source.repo)
        yield


def forget(store: Store, series: Series, source: Source) -> None:
    """Let git remove the commits of a series that are no longer needed."""
    with writing(store, source):
        git.git(source.repo, "update-ref", "-d", _ref(series, source))


def _ref(series: Series, source: Source) -> str:
    # a change of how patches become commits needs a new name: old stores keep the old commits
    return f"refs/patched/{code_of(__name__)}/{series.sha256[:16]}-{source.commit[:16]}"


def export(
    repo: Path, base: str, commit: str, env: Mapping[str, str] | None = None
) -> list[tuple[str, bytes]]:
    """Return (file name, bytes) of each commit's patch in canonical form, oldest first.

    ``repo`` is a bare repository of the store, since its own configuration applies.
    """
    with tempfile.TemporaryDirectory(prefix="sparkforge-export-") as folder:
        flags = (
            *EXPORT_FLAGS,
            *("--quiet", "--no-renames"),
            "--always",  # a commit without a change, too
            "--filename-max-length=200",  # the slug is cut later, at fewer letters
            f"--output-directory={folder}",
        )
        git.git(repo, "format-patch", *flags, f"{base}..{commit}", env=env)
        paths = sorted(Path(folder).iterdir())  # numbered
        return [(slug(path.stem.partition("-")[2]), path.read_bytes()) for path in paths]


def _remedy(source: Source) -> str:
    remedy = f"create it again on the pinned tree: git format-patch {' '.join(EXPORT_FLAGS)}"
    return "; or ".join([*source.instead, remedy])


def apply_recorded(
    store: Store, series: Series, source: Source, upstream: Upstream, *, again: bool = False
) -> Patched:
    """Apply a series; IntegrityError: the result is not its record in pins.yaml, if it has one."""
    check_emptied(series, upstream)
    patched = apply(store, series, source, again=again)
    recorded = upstream.patched.get(source.provider)
    if recorded and (recorded.commit, recorded.tree) != (patched.commit, patched.tree):
        msg = (
            f"upstreams.{series.upstream}.patched.{source.provider}: the patched tree is"
            f" {patched.tree} (commit {patched.commit}), but the record is {recorded.tree}"
            f" (commit {recorded.commit})"
        )
        remedy = f"if a patch changed on purpose: build.py {RECORD[source.provider]}"
        raise IntegrityError(msg, f"{remedy}; else series or source is not what was reviewed")
    return patched
