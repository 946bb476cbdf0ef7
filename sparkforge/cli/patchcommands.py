"""What the commands about pins and patches do. Returns exit codes, raises our errors."""

from __future__ import annotations

import argparse
from typing import Any

from sparkforge.build.options import (
    access_of,
    chosen_series,
    pins_path,
    settle,
    source_plan,
    store_of,
)
from sparkforge.core import transaction
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.pins import edit, pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import lint, series, worktree
from sparkforge.sources import sources

# -- pins --------------------------------------------------------------------------


def pins_check(options: argparse.Namespace) -> int:
    """Check pins.yaml and all that it names."""
    from sparkforge.sources import wheelhouse

    path = pins_path(options)
    loaded = pins.load(path)
    for target in loaded.targets.values():
        for lock in target.requirements.values():
            wheelhouse.read_lock(path.parent / lock)
    counts = {"upstreams": len(loaded.upstreams), "targets": len(loaded.targets),
              "files": sum(len(u.files) for u in loaded.upstreams.values())}  # fmt: skip
    unknown = [name for name, one in loaded.upstreams.items() if one.commit is None]
    if options.json:
        log.json({"pins": str(path), "ok": True, **counts, "commit_unknown": unknown})
    else:
        log.info(f"{path.name}: {counts['upstreams']} upstreams, {counts['files']} release files,"
                 f" {counts['targets']} targets: all well formed")  # fmt: skip
        for name in unknown:
            log.info(f"{name}: commit: unknown (build.py pins resolve)")
    return 0


def pins_record(options: argparse.Namespace) -> int:
    """Write the commit and tree that each series gives into pins.yaml."""
    path = pins_path(options)
    loaded = pins.load(path)
    store = store_of(options)
    access = access_of(options, loaded)
    plan = source_plan(options, RELEASE_PLAN)
    for name, upstream in loaded.upstreams.items():
        folder = path.parent / "patches" / name
        if not series.read(folder).patches:
            continue
        source = sources.ensure(store, name, upstream, plan, access)
        with transaction.held(path.parent):  # an export beside us must not change the series now
            patched = series.apply(store, series.read(folder), source)
            recorded = pins.Recorded(commit=patched.commit, tree=patched.tree)
            edit.record(path, name, source.provider, recorded)
        log.info(f"{name}: patched.{source.provider}: tree {patched.tree}")
    if options.json:
        log.json({"pins": str(path)})
    return 0


def pins_resolve(options: argparse.Namespace) -> int:
    """Write the commits that pins.yaml leaves out; check those of upstreams that are named."""
    from sparkforge.sources import resolving

    path = pins_path(options)
    loaded = pins.load(path)
    for name in options.upstream:
        loaded.upstream(name)
    chosen = options.upstream or [name for name, one in loaded.upstreams.items()
                                  if one.commit is None]  # fmt: skip
    store, access = store_of(options), access_of(options, loaded)
    found: dict[str, Any] = {}
    for name in chosen:
        upstream = loaded.upstreams[name]
        resolved = resolving.resolve(store, name, upstream, access)
        if upstream.commit is None:
            with transaction.held(path.parent):
                text = path.read_bytes().decode()
                fresh = edit.with_commit(path, text, name, resolved.commit)
                transaction.change(path.parent, {path: fresh.encode()})
        found[name] = {"commit": resolved.commit, "files": resolved.files,
                       "written": upstream.commit is None}  # fmt: skip
        agree = f", {resolved.files} files agree with the release's" if resolved.files else ""
        wrote = "written" if upstream.commit is None else "as pinned"
        log.info(f"{name}: {upstream.tag} is {resolved.commit}: {wrote}{agree}")
    if not chosen:
        log.info("no upstream lacks its commit; name one to check it")
    if options.json:
        log.json(found)
    return 0


# -- patches -------------------------------------------------------------------------


def patches_list(options: argparse.Namespace) -> int:
    """Print every patch in order."""
    path = pins_path(options)
    chosen = chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json({
            one.upstream: [
                {"file": patch.name, "subject": patch.subject, "author": patch.author,
                 "sha256": patch.sha256, "trailers": dict(patch.trailers),
                 "files": [entry.path for entry in patch.entries]}
                for patch in one.patches
            ]
            for one in chosen
        })  # fmt: skip
        return 0
    for one in chosen:
        log.heading(f"{one.upstream}: {len(one.patches)} patch(es)")
        for patch in one.patches:
            risk = patch.trailers.get("Risk", "?")
            status = patch.trailers.get("Upstream-Status", "?")
            log.info(f"{patch.name}  [{risk}, {status}]")
            log.info(f"    {patch.subject}")
    return 0


def patches_check(options: argparse.Namespace) -> int:
    """Lint every series; apply it in memory where the store has (or can get) its source."""
    path = pins_path(options)
    loaded = pins.load(path)
    store = store_of(options)
    access = access_of(options, loaded)
    plan = source_plan(options, RELEASE_PLAN)
    report: dict[str, Any] = {}
    problems: list[str] = []
    for one in chosen_series(options, path.parent, loaded):
        problems += lint.lint(one, path.parent, loaded.upstreams[one.upstream].paths)
        series.check_emptied(one, loaded.upstreams[one.upstream])
        if not one.patches:
            report[one.upstream] = {"patches": 0}
            continue
        upstream = loaded.upstreams[one.upstream]
        source = sources.ensure(store, one.upstream, upstream, plan, access)
        tree = series.patched_tree(store, one, source)
        recorded = upstream.patched.get(source.provider)
        # as commits, too: only so is it seen that exporting them again gives the same bytes
        commit = series.apply(store, one, source).commit
        series.check_record(one.upstream, source, commit, tree, recorded)
        report[one.upstream] = {"patches": len(one.patches), "tree": tree,
                                "recorded": recorded is not None}  # fmt: skip
        note = (
            "as recorded"
            if recorded
            else f"not recorded: build.py {series.RECORD[source.provider]}"
        )
        log.info(f"{one.upstream}: {len(one.patches)} patch(es) apply exactly, tree {tree[:12]},"
                 f" {note}")  # fmt: skip
    if problems:
        raise SeriesError("\n".join(problems))
    if options.json:
        log.json(report)
    return 0


def patches_apply(options: argparse.Namespace) -> int:
    """Give a work tree: the patched tree in a clone, with one commit a patch."""
    path = pins_path(options)
    loaded = pins.load(path)
    upstream = loaded.upstream(options.upstream)
    if options.folder.exists():
        msg = f"{options.folder}: is there already"
        raise UsageError(msg, "name a folder that does not exist yet")
    store = store_of(options)
    source = sources.ensure(store, options.upstream, upstream, RELEASE_PLAN,
                            access_of(options, loaded))  # fmt: skip
    one = series.read(path.parent / "patches" / options.upstream)
    patched = series.apply(store, one, source)
    recorded = upstream.patched.get(source.provider)
    series.check_record(options.upstream, source, patched.commit, patched.tree, recorded)
    worktree.make(patched, one, options.folder)
    log.info(f"{options.folder}: {options.upstream} with {len(one.patches)} patch(es),"
             f" commit {patched.commit}")  # fmt: skip
    if options.json:
        log.json({"folder": str(options.folder.resolve()), "commit": patched.commit,
                  "tree": patched.tree})  # fmt: skip
    return 0


def patches_stats(options: argparse.Namespace) -> int:
    """Print how many files and lines each patch changes."""
    from sparkforge.series import docs

    path = pins_path(options)
    chosen = chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json(docs.stats_json(chosen))
    else:
        log.table([docs.STATS_HEAD, *docs.stats_rows(chosen)])
    return 0


def patches_docs(options: argparse.Namespace) -> int:
    """Write docs/patches.md from the patches' messages, or say whether it is what they say."""
    from sparkforge.series import docs

    root = pins_path(options).parent
    loaded = pins.load(pins_path(options))
    text = docs.page(chosen_series(options, root, loaded), loaded.upstreams)
    return settle(options, {root / "docs" / "patches.md": text}, docs.COMMAND)
