"""patches: export, import, new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions
from sparkforge.core.errors import PinsError, SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, importing, series, worktree
from sparkforge.series.exporting import Chain
from sparkforge.series.lint import TRAILERS
from sparkforge.series.patchfile import NATIVE
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.sources.sources import Source


@Parameter(name="*", group="trailers")
@dataclass(frozen=True, kw_only=True)
class TrailerOptions:
    """Values of trailers of a patch's message."""

    upstream_status: str | None = None
    drop_when: str | None = None
    risk: str | None = None
    test: str | None = None
    native: str | None = None

    def given(self) -> dict[str, str]:
        """Return the values that are given, by the name of the trailer."""
        values = asdict(self)
        keys = {key: values[key.lower().replace("-", "_")] for key in (*TRAILERS, NATIVE)}
        return {key: value for key, value in keys.items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``patches export``."""

    folder: Path = field(default=Path(), kw_only=False)
    """work tree (default: the current folder)"""
    check: bool = False
    """fail if it would change a file; write nothing"""
    drop: tuple[str, ...] = ()
    """patch whose commit was removed on purpose; may be repeated"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of ``patches import``."""

    upstream: str = field(kw_only=False)
    file: tuple[Path, ...] = field(kw_only=False)
    before: str | None = None
    """insert before this patch (default: at the end)"""
    subject: str | None = None
    """subject to use instead of the patch's own"""
    why: str | None = None
    """text to put before the patch's message"""
    trailers: TrailerOptions = TrailerOptions()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Options of ``patches new``."""

    folder: Path = field(kw_only=False)
    """work tree from `patches apply`"""
    subject: str = field(kw_only=False)
    """one line that says what the patch does"""
    trailers: TrailerOptions = TrailerOptions()
    output: OutputOptions = OutputOptions()


def _source(project: Project, upstream: str) -> Source:
    pinned = project.pins.upstream(upstream)
    return sources.ensure(project.store, upstream, pinned, RELEASE_PLAN, project.access)


def export_series(options: ExportOptions = ExportOptions()) -> int:
    """Write a work tree's commits back as the series of its upstream."""
    tree = worktree.read(options.folder)
    commits, left = worktree.settled(tree)
    if left:
        log.warning(
            f"{tree.folder}: not committed: {', '.join(left[:5])}"
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )
    with Project.open(options.project).locked() as project:
        source = _source(project, tree.upstream)
        if source.commit != tree.base:
            msg = f"{tree.folder}: is based on {tree.base[:12]}, but {source.commit[:12]} is pinned"
            raise SeriesError(
                msg, "create a new work tree (build.py patches apply) and cherry-pick your commits"
            )
        chain = Chain(source, commits, tree.objects)
        now = series.read(project.series_folder(tree.upstream))
        # changes to the series since then must not be undone: only a no-op may pass
        behind = now.sha256 not in tree.series
        try:
            fresh, report, written = exporting.export(
                project, now, chain, drop=_names(options.drop), check=options.check or behind
            )
        except PinsError as error:
            if options.check or not behind:
                raise
            raise _behind(tree) from error
        worktree.exported(tree, commits, [patch.name for patch in fresh.patches], fresh.sha256)
    document = exporting.document(report, written)
    log.info(
        f"{tree.upstream}: {counted(len(fresh.patches), 'patch', 'patches')}, "
        + ("written" if written else "nothing to write")
    )
    log.document({"upstream": tree.upstream, **document})
    return 0


def _behind(tree: WorkTree) -> SeriesError:
    msg = f"patches/{tree.upstream}: changed since {tree.folder} was created from it"
    return SeriesError(
        msg, "make a new work tree (build.py patches apply) and cherry-pick your commits onto it"
    )


def _names(words: Sequence[str]) -> list[str]:
    return [f"{word.removesuffix('.patch')}.patch" for word in words]


def import_patches(options: ImportOptions) -> int:
    """Take patches from outside into a series."""
    for file in options.file:
        if not file.is_file():
            raise UsageError(f"{file}: no such file", "give a .patch, mbox or diff file")
    with Project.open(options.project).locked() as project:
        source = _source(project, options.upstream)
        patches = series.read(project.series_folder(options.upstream))
        wanted = importing.Wanted(
            options.trailers.given(),
            options.subject,
            options.why,
            _names([options.before])[0] if options.before else None,
        )
        patched = series.apply(project.store, patches, source)
        chain = importing.chain(project.store, patches, patched, options.file, wanted)
        fix = "add what the files lack: --why TEXT, --subject TEXT, or the option of a trailer"
        fresh, report, written = exporting.export(
            project, patches, chain, drop=(), check=False, fix=fix
        )
    document = exporting.document(report, written)
    log.info(f"{options.upstream}: {counted(len(fresh.patches), 'patch', 'patches')}")
    log.document({"upstream": options.upstream, **document})
    return 0


def new_patch(options: NewOptions) -> int:
    """Commit the staged changes of a work tree, under a message to be filled in."""
    if len(options.subject.split("\n")) != 1 or not any(map(str.isalnum, options.subject)):
        msg = f"{options.subject!r}: empty subject"
        raise UsageError(msg, "say in one line what the patch does; the file is named after it")
    tree = worktree.read(options.folder)
    trailers = options.trailers.given()
    commit = worktree.commit_template(
        tree, lambda subject, body: importing.template(options.subject, trailers, body)
    )
    log.info(
        f"{tree.folder}: commit {commit[:12]}; now write its message: git commit --amend,"
        " then build.py patches export"
    )
    log.document({"folder": str(tree.folder), "commit": commit})
    return 0
