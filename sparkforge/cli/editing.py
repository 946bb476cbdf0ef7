"""patches: export, import, new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions
from sparkforge.cli.parser import Parents, Parser, Subparsers, here
from sparkforge.core.errors import SeriesError, StaleError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import exporting, importing, series, worktree
from sparkforge.series.exporting import Chain
from sparkforge.series.lint import TRAILERS
from sparkforge.series.patchfile import NATIVE
from sparkforge.series.worktree import WorkTree
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions
from sparkforge.sources.sources import Source


@dataclass(frozen=True)
class TrailerOptions:
    """Values of trailers of a patch's message."""

    upstream_status: str | None
    drop_when: str | None
    risk: str | None
    test: str | None
    native: str | None

    def given(self) -> dict[str, str]:
        """Return the values that are given, by the name of the trailer."""
        values = asdict(self)
        keys = {key: values[key.lower().replace("-", "_")] for key in (*TRAILERS, NATIVE)}
        return {key: value for key, value in keys.items() if value is not None}


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``patches export``."""

    folder: Path
    check: bool
    drop: tuple[str, ...]
    project: ProjectOptions
    output: OutputOptions


@dataclass(frozen=True)
class ImportOptions:
    """Options of ``patches import``."""

    upstream: str
    file: tuple[Path, ...]
    before: str | None
    subject: str | None
    why: str | None
    trailers: TrailerOptions
    project: ProjectOptions
    output: OutputOptions


@dataclass(frozen=True)
class NewOptions:
    """Options of ``patches new``."""

    folder: Path
    subject: str
    trailers: TrailerOptions
    output: OutputOptions


def register(actions: Subparsers, groups: Parents) -> None:
    """Add the commands that write patches."""
    export = actions.add_parser(
        "export",
        parents=groups.project,
        help="write the commits of a work tree back as patches",
    )
    export.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        help="work tree (default: the current folder)",
    )
    export.add_argument(
        "--check", action="store_true", help="fail if it would change a file; write nothing"
    )
    export.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="NAME",
        help="patch whose commit was removed on purpose; may be repeated",
    )
    export.set_defaults(entry=here(ExportOptions, _export))
    import_ = actions.add_parser(
        "import",
        parents=[*groups.project, _trailer_options()],
        help="import patches (mbox, .patch, diff) into a series",
    )
    import_.add_argument("upstream")
    import_.add_argument("file", type=Path, nargs="+")
    import_.add_argument(
        "--before", metavar="NAME", help="insert before this patch (default: at the end)"
    )
    import_.add_argument(
        "--subject", metavar="TEXT", help="subject to use instead of the patch's own"
    )
    import_.add_argument("--why", metavar="TEXT", help="text to put before the patch's message")
    import_.set_defaults(entry=here(ImportOptions, _import))
    new = actions.add_parser(
        "new",
        parents=[groups.output, _trailer_options()],
        help="commit the staged changes of a work tree with a message template",
    )
    new.add_argument("folder", type=Path, help="work tree from `patches apply`")
    new.add_argument("subject", help="one line that says what the patch does")
    new.set_defaults(entry=here(NewOptions, _new))


def _trailer_options() -> Parser:
    parser = Parser(add_help=False)
    for key in (*TRAILERS, NATIVE):
        parser.add_argument(f"--{key.lower()}", metavar="TEXT", help=f"value of the trailer {key}")
    return parser


def _source(project: Project, upstream: str) -> Source:
    pinned = project.pins.upstream(upstream)
    return sources.ensure(project.store, upstream, pinned, RELEASE_PLAN, project.access)


def _export(options: ExportOptions) -> int:
    """Write a work tree's commits back as the series of its upstream."""
    tree = worktree.read(options.folder)
    commits = worktree.settled(tree)
    if left := worktree.untracked(tree):
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
        # what others did to the series since must not be undone: only a no-op may pass
        behind = now.sha256 not in tree.series
        try:
            fresh, report, written = exporting.export(
                project, chain, drop=_names(options.drop), check=options.check or behind
            )
        except StaleError as error:
            if options.check or not behind:
                raise
            raise _behind(tree) from error
        worktree.exported(tree, commits, [patch.name for patch in fresh.patches], fresh.sha256)
    document = exporting.document(report, written)
    log.info(
        f"{tree.upstream}: {len(fresh.patches)} patch(es), "
        + ("written" if written else "nothing to write")
    )
    if options.output.json:
        log.json({"upstream": tree.upstream, **document})
    return 0


def _behind(tree: WorkTree) -> SeriesError:
    msg = f"patches/{tree.upstream}: changed since {tree.folder} was created from it"
    return SeriesError(
        msg, "make a new work tree (build.py patches apply) and cherry-pick your commits onto it"
    )


def _names(words: Sequence[str]) -> list[str]:
    return [f"{word.removesuffix('.patch')}.patch" for word in words]


def _import(options: ImportOptions) -> int:
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
        fresh, report, written = exporting.export(project, chain, drop=(), check=False)
    document = exporting.document(report, written)
    log.info(f"{options.upstream}: {len(fresh.patches)} patch(es)")
    if options.output.json:
        log.json({"upstream": options.upstream, **document})
    return 0


def _new(options: NewOptions) -> int:
    """Commit what is staged in a work tree, under a message to be filled in."""
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
    if options.output.json:
        log.json({"folder": str(tree.folder), "commit": commit})
    return 0
