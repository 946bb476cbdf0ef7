"""pins."""

from sparkforge.build.options import (
    CheckoutOptions,
    OutputOptions,
    SourceName,
    command_options,
)
from sparkforge.core.log import log
from sparkforge.pins import pins, yamlfile
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
        log.info(f"{name}: commit: unknown")
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
        with project.locked() as now:  # a concurrent export must not change the series
            patched = series.apply(store, series.read(folder), source)
            recorded = pins.Recorded(commit=patched.commit, tree=patched.tree)
            before = now.pins.upstream(name).patched
            yamlfile.record(path, name, {**before, source.provider: recorded})
        log.info(f"{name}: patched.{source.provider}: tree {patched.tree}")
    log.document({"pins": str(path)})
    return 0
