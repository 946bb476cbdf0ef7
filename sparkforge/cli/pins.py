"""pins."""

from __future__ import annotations

import argparse
from typing import Any

from sparkforge.build.options import access_of, pins_path, source_plan, store_of
from sparkforge.cli.parser import Parents, Parser, Subparsers, source_option
from sparkforge.core import transaction
from sparkforge.core.log import log
from sparkforge.pins import edit, pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import series
from sparkforge.sources import sources


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about pins.yaml."""
    parser = subparsers.add_parser("pins", help="check pins.yaml and record the patched trees")
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser
    )
    check = actions.add_parser("check", parents=[groups.shared], help="check pins.yaml")
    check.set_defaults(run=_check)
    record = actions.add_parser(
        "record",
        parents=[groups.shared, groups.sources],
        help="record the patched trees in pins.yaml",
    )
    source_option(record, "release")
    record.set_defaults(run=_record)
    resolve = actions.add_parser(
        "resolve",
        parents=[groups.shared, groups.sources],
        help="look up the commits that pins.yaml leaves out, and record them",
    )
    resolve.add_argument(
        "upstream",
        nargs="*",
        help="upstreams to look up, even if recorded (default: those without a commit)",
    )
    resolve.set_defaults(run=_resolve)


def _check(options: argparse.Namespace) -> int:
    """Check pins.yaml and all that it names."""
    from sparkforge.sources import wheelhouse

    path = pins_path(options)
    loaded = pins.load(path)
    for target in loaded.targets.values():
        for lock in target.requirements.values():
            wheelhouse.read_lock(path.parent / lock)
    counts = {
        "upstreams": len(loaded.upstreams),
        "targets": len(loaded.targets),
        "files": sum(len(u.files) for u in loaded.upstreams.values()),
    }
    unknown = [name for name, one in loaded.upstreams.items() if one.commit is None]
    if options.json:
        log.json({"pins": str(path), "ok": True, **counts, "commit_unknown": unknown})
    else:
        log.info(
            f"{path.name}: {counts['upstreams']} upstreams, {counts['files']} release files,"
            f" {counts['targets']} targets; no problems"
        )
        for name in unknown:
            log.info(f"{name}: commit: unknown (build.py pins resolve)")
    return 0


def _record(options: argparse.Namespace) -> int:
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


def _resolve(options: argparse.Namespace) -> int:
    """Write the commits that pins.yaml leaves out; check those of upstreams that are named."""
    from sparkforge.sources import resolving

    path = pins_path(options)
    loaded = pins.load(path)
    for name in options.upstream:
        loaded.upstream(name)
    chosen = options.upstream or [
        name for name, one in loaded.upstreams.items() if one.commit is None
    ]
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
        found[name] = {
            "commit": resolved.commit,
            "files": resolved.files,
            "written": upstream.commit is None,
        }
        agree = f", {resolved.files} files match the release" if resolved.files else ""
        wrote = "written" if upstream.commit is None else "as pinned"
        log.info(f"{name}: {upstream.tag} is {resolved.commit}: {wrote}{agree}")
    if not chosen:
        log.info("every upstream has its commit; give an upstream to check it")
    if options.json:
        log.json(found)
    return 0
