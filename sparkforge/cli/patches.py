"""patches: list, check, apply, stats."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions, SourceName, chosen_series, source_plan
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.log import counted, log
from sparkforge.core.run import in_parallel
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import lint, series, worktree
from sparkforge.series.series import Patched, Series
from sparkforge.sources import sources
from sparkforge.sources.project import PinsFile, Project, ProjectOptions, checkout
from sparkforge.sources.sources import Source

_PARALLEL = 4  # series that are applied at once


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SeriesOptions:
    """Options of ``patches list`` and ``patches stats``."""

    upstream: str | None = field(default=None, kw_only=False)
    """only this upstream's series"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of ``patches check``."""

    upstream: str | None = field(default=None, kw_only=False)
    """only this upstream's series"""
    source: SourceName = None
    """release files; git: commits of the pinned tags; auto: git, or release files if git is
    unreachable (default: release)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """Options of ``patches apply``."""

    upstream: str = field(kw_only=False)
    folder: Path = field(kw_only=False)
    """folder to create; must not exist"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def list_patches(options: SeriesOptions = SeriesOptions()) -> int:
    """Print every patch in order."""
    here = checkout(options.pins)
    chosen = chosen_series(options.upstream, here.root, here.pins)
    if options.output.json:
        log.json(
            {
                own.upstream: [
                    {
                        "file": patch.name,
                        "subject": patch.subject,
                        "author": patch.author,
                        "sha256": patch.sha256,
                        "trailers": dict(patch.trailers),
                        "files": [entry.path for entry in patch.entries],
                    }
                    for patch in own.patches
                ]
                for own in chosen
            }
        )
        return 0
    for own in chosen:
        log.heading(f"{own.upstream}: {counted(len(own.patches), 'patch', 'patches')}")
        for patch in own.patches:
            risk = patch.trailers.get("Risk", "?")
            status = patch.trailers.get("Upstream-Status", "?")
            log.info(f"{patch.name}  [{risk}, {status}]")
            log.info(f"    {patch.subject}")
    return 0


def check_series(options: CheckOptions = CheckOptions()) -> int:
    """Lint every series, and apply it to its source."""
    project = Project.open(options.project)
    store, loaded = project.store, project.pins
    plan = source_plan(options.source, project.access, RELEASE_PLAN)
    report: dict[str, Any] = {}
    problems: list[str] = []
    todo: list[tuple[Series, Source]] = []
    for own in chosen_series(options.upstream, project.root, loaded):
        upstream = loaded.upstreams[own.upstream]
        problems += lint.lint(own, project.root, upstream.paths)
        series.check_emptied(own, upstream)
        report[own.upstream] = {"patches": len(own.patches)}
        if own.patches:
            source = sources.ensure(store, own.upstream, upstream, plan, project.access)
            todo.append((own, source))

    def applied(job: tuple[Series, Source], stopping: Event) -> Patched:
        return series.apply(store, *job, again=True)

    # each in a repository of its own
    for (own, source), patched in zip(todo, in_parallel(applied, todo, _PARALLEL), strict=True):
        recorded = loaded.upstreams[own.upstream].patched.get(source.provider)
        series.check_record(own.upstream, source, patched.commit, patched.tree, recorded)
        report[own.upstream] |= {"tree": patched.tree, "recorded": recorded is not None}
        note = (
            "as recorded"
            if recorded
            else f"not recorded: build.py {series.RECORD[source.provider]}"
        )
        log.info(
            f"{own.upstream}: {counted(len(own.patches), 'patch applies', 'patches apply')}"
            f" exactly, tree {patched.tree[:12]}, {note}"
        )
    if problems:
        raise SeriesError("\n".join(problems))
    log.document(report)
    return 0


def apply_series(options: ApplyOptions) -> int:
    """Make a work tree: a clone with one commit for each patch."""
    project = Project.open(options.project)
    store, upstream = project.store, project.pins.upstream(options.upstream)
    if options.folder.exists():
        raise UsageError(f"{options.folder}: already exists", "give a folder that does not exist")
    source = sources.ensure(store, options.upstream, upstream, RELEASE_PLAN, project.access)
    patches = series.read(project.root / "patches" / options.upstream)
    patched = series.apply_recorded(store, patches, source, upstream)
    worktree.make(patched, patches, options.folder)
    log.info(
        f"{options.folder}: {options.upstream} with"
        f" {counted(len(patches.patches), 'patch', 'patches')}, commit {patched.commit}"
    )
    log.document(
        {"folder": str(options.folder.resolve()), "commit": patched.commit, "tree": patched.tree}
    )
    return 0


def show_stats(options: SeriesOptions = SeriesOptions()) -> int:
    """Print how many files and lines each patch changes."""
    from sparkforge.series import docs

    here = checkout(options.pins)
    chosen = chosen_series(options.upstream, here.root, here.pins)
    if options.output.json:
        log.json(docs.stats_json(chosen))
    else:
        log.table([docs.STATS_HEAD, *docs.stats_rows(chosen)])
    return 0
