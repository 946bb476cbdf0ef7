"""patches: list, check, apply, export, import; pins record."""

from dataclasses import field
from pathlib import Path
from typing import Any

from sparkforge.build.options import OutputOptions, SourceName, chosen_series, command_options
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.pins import yamlfile
from sparkforge.pins.pins import RELEASE_PLAN, Recorded
from sparkforge.series import exporting, lint, series, worktree
from sparkforge.series.series import Series
from sparkforge.sources import sources
from sparkforge.sources.project import PinsFile, Project, ProjectOptions, checkout
from sparkforge.sources.sources import Source

_CHERRY_PICK = "make a new work tree (build.py patches apply) and cherry-pick your commits onto it"


@command_options
class ListOptions:
    upstream: str | None = field(default=None, kw_only=False)
    """only this upstream's series"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


@command_options
class CheckOptions:
    upstream: str | None = field(default=None, kw_only=False)
    """only this upstream's series"""
    source: SourceName = None
    """release files; git: commits of the pinned tags; auto: git, or release files if git is
    unreachable (default: release)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@command_options
class ApplyOptions:
    upstream: str = field(kw_only=False)
    folder: Path = field(kw_only=False)
    """folder to create; must not exist"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@command_options
class ExportOptions:
    folder: Path = field(default=Path(), kw_only=False)
    """work tree (default: the current folder)"""
    check: bool = False
    """fail if it would change a file; write nothing"""
    drop: tuple[str, ...] = ()
    """patch whose commit was removed on purpose; may be repeated"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@command_options
class ImportOptions:
    upstream: str = field(kw_only=False)
    file: tuple[Path, ...] = field(kw_only=False)
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def list_patches(options: ListOptions = ListOptions()) -> int:
    """Print every patch in order."""
    here = checkout(options.pins)
    document: dict[str, list[dict[str, Any]]] = {}
    for own in chosen_series(options.upstream, here.root, here.pins):
        log.heading(f"{own.upstream}: {counted(len(own.patches), 'patch', 'patches')}")
        document[own.upstream] = []
        for patch in own.patches:
            kind = (patch.trailers.get(key, "?") for key in ("Risk", "Upstream-Status"))
            log.info(f"{patch.name}  [{', '.join(kind)}]")
            log.info(f"    {patch.subject}")
            entry = {name: getattr(patch, name) for name in ("subject", "author", "sha256")}
            entry |= {"file": patch.name, "trailers": dict(patch.trailers)}
            document[own.upstream].append(entry | {"files": [one.path for one in patch.entries]})
    log.document(document)
    return 0


def check_series(options: CheckOptions = CheckOptions()) -> int:
    """Lint every series, and apply it to its source."""
    project = Project.open(options.project)
    plan = options.source or RELEASE_PLAN
    report, problems = dict[str, Any](), list[str]()
    for own in chosen_series(options.upstream, project.root, project.pins):
        name, upstream = own.upstream, project.pins.upstream(own.upstream)
        problems += lint.lint(own, project.root, upstream.paths)
        report[name] = {"patches": len(own.patches)}
        if own.patches or upstream.patched:
            source = sources.ensure(project.store, name, upstream, plan, project.access)
            patched = series.apply_recorded(project.store, own, source, upstream, again=True)
            known = source.provider in upstream.patched
            report[name] |= {"tree": patched.tree, "recorded": known}
            how = f"not recorded: build.py {series.RECORD[source.provider]}"
            applies = counted(len(own.patches), "patch applies", "patches apply")
            state = f"tree {patched.tree[:12]}, {'as recorded' if known else how}"
            log.info(f"{name}: {applies} exactly, {state}")
    if problems:
        raise SeriesError("\n".join(problems))
    log.document(report)
    return 0


def record_trees(options: CheckOptions = CheckOptions()) -> int:
    """Write the commit and tree that each series gives into pins.yaml."""
    project = Project.open(options.project)
    path, store = project.pins_path, project.store
    plan = options.source or RELEASE_PLAN
    for own in chosen_series(options.upstream, project.root, project.pins):
        if not own.patches:
            continue
        upstream = project.pins.upstream(own.upstream)
        source = sources.ensure(store, own.upstream, upstream, plan, project.access)
        with project.locked() as now:  # a concurrent export must not change the series
            patched = series.apply(store, series.read(project.series_folder(own.upstream)), source)
            recorded = Recorded(commit=patched.commit, tree=patched.tree)
            before = now.pins.upstream(own.upstream).patched
            yamlfile.record(path, own.upstream, {**before, source.provider: recorded})
        log.info(f"{own.upstream}: patched.{source.provider}: tree {patched.tree}")
    log.document({"pins": str(path)})
    return 0


def apply_series(options: ApplyOptions) -> int:
    """Make a work tree: a clone with one commit for each patch."""
    project = Project.open(options.project)
    if options.folder.exists():
        raise UsageError(f"{options.folder}: already exists", "give a folder that does not exist")
    source, own = _source(project, options.upstream)
    upstream = project.pins.upstream(options.upstream)
    patched = series.apply_recorded(project.store, own, source, upstream)
    worktree.make(patched, own, options.folder)
    folder, number = str(options.folder.resolve()), counted(len(own.patches), "patch", "patches")
    log.info(f"{folder}: {options.upstream} with {number}, commit {patched.commit}")
    log.document({"folder": folder, "commit": patched.commit, "tree": patched.tree})
    return 0


def _source(project: Project, upstream: str) -> tuple[Source, Series]:
    pinned = project.pins.upstream(upstream)
    source = sources.ensure(project.store, upstream, pinned, RELEASE_PLAN, project.access)
    return source, series.read(project.series_folder(upstream))


def export_series(options: ExportOptions = ExportOptions()) -> int:
    """Write a work tree's commits back as the series of its upstream."""
    tree = worktree.read(options.folder)
    if left := worktree.settled(tree):
        log.warning(f"{tree.folder}: {len(left)} files are not committed: {', '.join(left[:5])}")
    with Project.open(options.project).locked() as project:
        source, now = _source(project, tree.upstream)
        if source.commit != tree.base:
            msg = f"{tree.folder}: is based on {tree.base[:12]}, but {source.commit[:12]} is pinned"
            raise SeriesError(msg, _CHERRY_PICK)
        if now.sha256 not in tree.series:  # those changes must not be undone
            msg = f"patches/{tree.upstream}: changed since {tree.folder} was created from it"
            raise SeriesError(msg, _CHERRY_PICK)
        drop = [f"{name.removesuffix('.patch')}.patch" for name in options.drop]
        fresh, report = exporting.export(
            *(project, now, source, tree.head), env=tree.objects, drop=drop, check=options.check
        )
        worktree.exported(tree, fresh.sha256)
    log.document(report)
    return 0


def import_patches(options: ImportOptions) -> int:
    """Take patches from outside into a series."""
    for file in options.file:
        if not file.is_file():
            raise UsageError(f"{file}: no such file", "give a .patch or mbox file")
    with Project.open(options.project).locked() as project:
        source, now = _source(project, options.upstream)
        patched = series.apply(project.store, now, source)
        tip = exporting.imported(project.store, patched, options.file)
        _, report = exporting.export(project, now, source, tip)
    log.document(report)
    return 0
