"""pins."""

from dataclasses import field
from typing import Any

from sparkforge.build.options import (
    CheckoutOptions,
    OutputOptions,
    SourceName,
    command_options,
)
from sparkforge.core.disk import write_files
from sparkforge.core.log import log
from sparkforge.pins import edit, pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.sources import sources
from sparkforge.sources.project import Project, ProjectOptions, checkout


@command_options
class RecordOptions:
    source: SourceName = None
    """release files; git: commits of the pinned tags; auto: git, or release files if git is
    unreachable (default: release)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


@command_options
class ResolveOptions:
    upstream: tuple[str, ...] = field(default=(), kw_only=False)
    """upstreams to look up, even if recorded (default: those without a commit)"""
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()


def check_pins(options: CheckoutOptions = CheckoutOptions()) -> int:
    """Check pins.yaml and all that it names."""
    from sparkforge.sources import wheelhouse

    here = checkout(options.pins)
    loaded = here.pins
    for target in loaded.targets.values():
        for lock in target.requirements.values():
            wheelhouse.read_lock(here.root / lock)
    counts = {
        "upstreams": len(loaded.upstreams),
        "targets": len(loaded.targets),
        "files": sum(len(u.files) for u in loaded.upstreams.values()),
    }
    unknown = [name for name, upstream in loaded.upstreams.items() if upstream.commit is None]
    numbers = ", ".join(f"{number} {what}" for what, number in counts.items())
    log.info(f"{here.pins_path.name}: {numbers}; no problems")
    for name in unknown:
        log.info(f"{name}: commit: unknown (build.py pins resolve)")
    log.document({"pins": str(here.pins_path), "ok": True, **counts, "commit_unknown": unknown})
    return 0


def record_trees(options: RecordOptions = RecordOptions()) -> int:
    """Write the commit and tree that each series gives into pins.yaml."""
    project = Project.open(options.project)
    path, store = project.pins_path, project.store
    plan = options.source or RELEASE_PLAN
    for name, upstream in project.pins.upstreams.items():
        folder = project.root / "patches" / name
        if not series.read(folder).patches:
            continue
        source = sources.ensure(store, name, upstream, plan, project.access)
        with project.locked():  # a concurrent export must not change the series now
            patched = series.apply(store, series.read(folder), source)
            recorded = pins.Recorded(commit=patched.commit, tree=patched.tree)
            edit.record(path, name, source.provider, recorded)
        log.info(f"{name}: patched.{source.provider}: tree {patched.tree}")
    log.document({"pins": str(path)})
    return 0


def resolve_commits(options: ResolveOptions = ResolveOptions()) -> int:
    """Write the commits that pins.yaml leaves out; check those of upstreams that are named."""
    project = Project.open(options.project)
    path, loaded = project.pins_path, project.pins
    for name in options.upstream:
        loaded.upstream(name)
    chosen = options.upstream or [
        name for name, upstream in loaded.upstreams.items() if upstream.commit is None
    ]
    found: dict[str, Any] = {}
    for name in chosen:
        upstream = loaded.upstreams[name]
        resolved = sources.resolve(project.store, name, upstream, project.access)
        if written := upstream.commit is None:
            with project.locked():
                text = path.read_bytes().decode()
                fresh = edit.with_commit(path, text, name, resolved.commit)
                write_files({path: fresh.encode()})
        found[name] = {"commit": resolved.commit, "files": resolved.files, "written": written}
        agree = f", {resolved.files} files match the release" if resolved.files else ""
        wrote = "written" if written else "as pinned"
        log.info(f"{name}: {upstream.tag} is {resolved.commit}: {wrote}{agree}")
    if not chosen:
        log.info("every upstream has its commit; give an upstream to check it")
    log.document(found)
    return 0
