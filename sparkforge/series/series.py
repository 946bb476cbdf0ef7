"""Series ↔ commits: read, check, apply, export.

A patch that is not exact is refused. Each file's original blob (which ``--full-index`` writes into
the patch) must be the blob in the tree, so there is neither fuzz nor offset. The blob after it must
be the one in the patch.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sparkforge.core import git, plain
from sparkforge.core.errors import CommandError, IntegrityError, SeriesError
from sparkforge.pins.pins import Provider, Recorded, Upstream
from sparkforge.series.patchfile import Patch, check_shadows, read_patch, slug
from sparkforge.sources.sources import RELEASE_INSTEAD, Source
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

    def without(self, names: Sequence[str]) -> Series:
        """Return the series without some patches (the unpatched release: without all)."""
        kept = tuple(patch for patch in self.patches if patch.name not in names)
        return Series(self.upstream, self.folder, kept)


@dataclass(frozen=True)
class Patched:
    """A source with its series applied."""

    source: Source
    commit: str
    tree: str
    """``commit``, ``tree``: full SHAs, the same on every machine."""
    touched: Mapping[str, str] = field(default_factory=dict)
    """Paths that differ from the source, each with its patch's name (the last one)."""


# -- reading -------------------------------------------------------------------


def read(folder: Path) -> Series:
    """Read ``folder/series`` and its patches; no such file: an empty series.

    Raises:
        SeriesError: series and files disagree, or a patch can't be read.
    """
    listing = folder / "series"
    names = []
    if listing.exists():
        try:
            lines = listing.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise SeriesError(f"{listing}: not UTF-8 text: {error}", "write it again") from None
        except OSError as error:
            raise SeriesError(f"{listing}: {error.strerror}", "restore it from git") from None
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    twice = sorted({name for name in names if names.count(name) > 1})
    files = {path.name for path in folder.glob("*.patch") if path.is_file()}
    problems = [f"{listing}: {name} is listed twice: keep one line" for name in twice]
    problems += [
        f"{listing}: {n}: no such file: add it or remove the line" for n in names if n not in files
    ]
    problems += [
        f"{folder / n}: not listed in series: add a line or remove the file"
        for n in sorted(files - set(names))
    ]
    if problems:
        raise SeriesError("\n".join(map(plain.escaped, problems)))
    return Series(folder.name, folder, tuple(read_patch(folder / name) for name in names))


def listing(folder: Path, names: Sequence[str]) -> bytes:
    """Return the new ``folder/series`` with these patches, each with the comments before it.

    Comments before a removed patch stay, before the next one. So the head of the file stays, too.
    """
    path = folder / "series"
    comments: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        if not line.strip() or line.startswith("#"):
            waiting.append(line)
        elif line.strip() in names:
            comments[line.strip()], waiting = waiting, []
    lines = [line for name in names for line in (*comments.get(name, ()), name)]
    return "".join(f"{line}\n" for line in [*lines, *waiting]).encode()


# -- check and apply ---------------------------------------------------------------


def _check_exact(series: Series, source: Source) -> None:
    """Compare every patch's original blobs with its tree."""
    paths = [entry.path for patch in series.patches for entry in patch.entries]
    now = git.blobs_at(source.repo, source.commit, paths)
    for patch in series.patches:
        for entry in patch.entries:
            met = now.get(entry.path, git.ABSENT)
            exact = met != git.ABSENT if entry.old_blob is None else met == entry.old_blob
            if not exact:
                wanted = git.shown(entry.old_blob) if entry.old_blob else "another mode of it"
                msg = (
                    f"{patch.path}: does not apply exactly: {entry.path} is {git.shown(met)}"
                    f" in {source.upstream} ({source.origin}), the patch expects {wanted}"
                )
                remedy = "fuzz and offsets are not allowed: recreate the patch on the pinned tree"
                if source.provider == "git":
                    remedy = f"{RELEASE_INSTEAD}; or recreate the patch on git's tree"
                raise SeriesError(msg, remedy)
            now[entry.path] = entry.new_blob or met


def check_emptied(series: Series, upstream: Upstream) -> None:
    """Refuse an upstream whose record says patched while its series is empty.

    Raises:
        IntegrityError: it would be built unpatched, under the patched name.
    """
    if not series.patches and upstream.patched:
        msg = f"{series.folder}: no patches, but pins.yaml records a patched tree"
        remedy = f"restore the series, or remove upstreams.{series.upstream}.patched from pins.yaml"
        raise IntegrityError(msg, remedy)


def apply(store: Store, series: Series, source: Source, *, again: bool = False) -> Patched:
    """Apply the series as commits on the source, in the store's repository.

    Args:
        again: apply also a series that this code has applied there before.

    Raises:
        SeriesError: a patch does not apply exactly, or is not in canonical form.
    """
    if not series.patches:
        return Patched(source, source.commit, source.tree)
    touched = {entry.path: patch.name for patch in series.patches for entry in patch.entries}
    names = (f"{_ref(series, source)}^{{commit}}", f"{_ref(series, source)}^{{tree}}")
    code, ids = git.attempt(source.repo, "rev-parse", "--quiet", *names)
    if code or again:
        ids = _applied(store, series, source)
    commit, tree = ids.split()
    return Patched(source, commit, tree, touched)


def _applied(store: Store, series: Series, source: Source) -> str:
    """Apply the series, point a ref at it, and return the commit and the tree."""
    _check_exact(series, source)
    paths = [entry.path for patch in series.patches for entry in patch.entries]
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
            msg = f"{series.folder}: git am failed:\n{error}"
            raise SeriesError(msg, "recreate that patch on the pinned tree") from error
        ids = git.git(tree, "rev-parse", "HEAD", "HEAD^{tree}")
        commit = ids.partition("\n")[0]
        _check_canonical(series, source, commit)
        changed = git.changes(source.repo, source.commit, commit)
        new = {change.path for change in changed if change.old_blob == git.ABSENT}
        names = git.git(source.repo, "ls-tree", "-r", "-z", "--name-only", commit).split("\0")
        check_shadows(new, names, str(series.folder))
        # git keeps a worktree's commits only while something points at them
        git.git(source.repo, "update-ref", _ref(series, source), commit)
    return ids


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

    Args:
        repo: a bare repository of the store, since its own configuration applies.
        env: further variables of git.
    """
    with tempfile.TemporaryDirectory(prefix="sparkforge-export-") as folder:
        git.git(
            repo,
            "format-patch",
            *EXPORT_FLAGS,
            "--quiet",
            "--no-renames",
            "--always",  # a commit without a change, too
            "--filename-max-length=200",  # the slug is cut later, at fewer letters
            f"--output-directory={folder}",
            f"{base}..{commit}",
            env=env,
        )
        numbered = sorted(
            (int(number), path)
            for path in Path(folder).iterdir()
            for number in (path.name.partition("-")[0],)
        )
        return [(slug(path.stem.partition("-")[2]), path.read_bytes()) for _, path in numbered]


def _check_canonical(series: Series, source: Source, commit: str) -> None:
    for patch, (_, data) in zip(
        series.patches, export(source.repo, source.commit, commit), strict=True
    ):
        if patch.path.read_bytes() != data:
            msg = f"{patch.path}: not in canonical form; an export would change it"
            flags = " ".join(EXPORT_FLAGS)
            raise SeriesError(msg, f"export it with git format-patch {flags}")


def apply_recorded(store: Store, series: Series, source: Source, upstream: Upstream) -> Patched:
    """Apply a series and compare the result with its record in pins.yaml, if there is one.

    Raises:
        SeriesError: as ``apply``.
        IntegrityError: as ``check_emptied`` and ``check_record``.
    """
    check_emptied(series, upstream)
    patched = apply(store, series, source)
    recorded = upstream.patched.get(source.provider)
    check_record(series.upstream, source, patched.commit, patched.tree, recorded)
    return patched


def check_record(
    upstream: str, source: Source, commit: str | None, tree: str, recorded: Recorded | None
) -> None:
    """Compare a patched tree, and the commit if there is one, with the record in pins.yaml.

    Raises:
        IntegrityError: they differ.
    """
    if recorded is None:
        return
    if recorded.tree != tree or (commit is not None and recorded.commit != commit):
        msg = (
            f"upstreams.{upstream}.patched.{source.provider}: the patched tree is {tree}"
            f" (commit {commit or 'not created'}), but the record is {recorded.tree}"
            f" (commit {recorded.commit})"
        )
        remedy = (
            f"if a patch changed on purpose, record it: build.py {RECORD[source.provider]};"
            " if not, the series or the source differs from what was reviewed"
        )
        raise IntegrityError(msg, remedy)
