"""patches: list, check, apply, stats, docs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparkforge.build.options import (
    access_of,
    chosen_series,
    pins_path,
    settle,
    source_plan,
    store_of,
)
from sparkforge.cli import editing
from sparkforge.cli.parser import Parents, Parser, Subparsers, source_option
from sparkforge.core.errors import SeriesError, UsageError
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.pins import RELEASE_PLAN
from sparkforge.series import lint, series, worktree
from sparkforge.sources import sources


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about the series."""
    parser = subparsers.add_parser("patches", help="list, check, apply, edit or document patches")
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser
    )
    listing = actions.add_parser("list", parents=[groups.shared], help="list all patches in order")
    listing.add_argument("upstream", nargs="?", help="only this upstream's series")
    listing.set_defaults(run=_list)
    check = actions.add_parser(
        "check",
        parents=[groups.shared, groups.sources],
        help="lint the patches and check that they apply and give the recorded trees",
    )
    check.add_argument("upstream", nargs="?", help="only this upstream's series")
    source_option(check, "release")
    check.set_defaults(run=_check)
    apply = actions.add_parser(
        "apply",
        parents=[groups.shared, groups.sources],
        help="create a git work tree with the patches as commits",
    )
    apply.add_argument("upstream")
    apply.add_argument("folder", type=Path, help="folder to create; must not exist")
    apply.set_defaults(run=_apply)
    editing.register(actions, groups)
    stats = actions.add_parser("stats", parents=[groups.shared], help="show the size of each patch")
    stats.add_argument("upstream", nargs="?", help="only this upstream's series")
    stats.set_defaults(run=_stats)
    page = actions.add_parser("docs", parents=[groups.shared], help="write docs/patches.md")
    page.add_argument("--check", action="store_true", help="fail if it is stale; write nothing")
    page.set_defaults(run=_docs, upstream=None)


def _list(options: argparse.Namespace) -> int:
    """Print every patch in order."""
    path = pins_path(options)
    chosen = chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json(
            {
                one.upstream: [
                    {
                        "file": patch.name,
                        "subject": patch.subject,
                        "author": patch.author,
                        "sha256": patch.sha256,
                        "trailers": dict(patch.trailers),
                        "files": [entry.path for entry in patch.entries],
                    }
                    for patch in one.patches
                ]
                for one in chosen
            }
        )
        return 0
    for one in chosen:
        log.heading(f"{one.upstream}: {len(one.patches)} patch(es)")
        for patch in one.patches:
            risk = patch.trailers.get("Risk", "?")
            status = patch.trailers.get("Upstream-Status", "?")
            log.info(f"{patch.name}  [{risk}, {status}]")
            log.info(f"    {patch.subject}")
    return 0


def _check(options: argparse.Namespace) -> int:
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
        report[one.upstream] = {
            "patches": len(one.patches),
            "tree": tree,
            "recorded": recorded is not None,
        }
        note = (
            "as recorded"
            if recorded
            else f"not recorded: build.py {series.RECORD[source.provider]}"
        )
        log.info(
            f"{one.upstream}: {len(one.patches)} patch(es) apply exactly, tree {tree[:12]}, {note}"
        )
    if problems:
        raise SeriesError("\n".join(problems))
    if options.json:
        log.json(report)
    return 0


def _apply(options: argparse.Namespace) -> int:
    """Give a work tree: the patched tree in a clone, with one commit a patch."""
    path = pins_path(options)
    loaded = pins.load(path)
    upstream = loaded.upstream(options.upstream)
    if options.folder.exists():
        msg = f"{options.folder}: already exists"
        raise UsageError(msg, "give a folder that does not exist")
    store = store_of(options)
    source = sources.ensure(
        store, options.upstream, upstream, RELEASE_PLAN, access_of(options, loaded)
    )
    one = series.read(path.parent / "patches" / options.upstream)
    patched = series.apply(store, one, source)
    recorded = upstream.patched.get(source.provider)
    series.check_record(options.upstream, source, patched.commit, patched.tree, recorded)
    worktree.make(patched, one, options.folder)
    log.info(
        f"{options.folder}: {options.upstream} with {len(one.patches)} patch(es),"
        f" commit {patched.commit}"
    )
    if options.json:
        log.json(
            {
                "folder": str(options.folder.resolve()),
                "commit": patched.commit,
                "tree": patched.tree,
            }
        )
    return 0


def _stats(options: argparse.Namespace) -> int:
    """Print how many files and lines each patch changes."""
    from sparkforge.series import docs

    path = pins_path(options)
    chosen = chosen_series(options, path.parent, pins.load(path))
    if options.json:
        log.json(docs.stats_json(chosen))
    else:
        log.table([docs.STATS_HEAD, *docs.stats_rows(chosen)])
    return 0


def _docs(options: argparse.Namespace) -> int:
    """Write docs/patches.md from the patches' messages, or say whether it is what they say."""
    from sparkforge.series import docs

    root = pins_path(options).parent
    loaded = pins.load(pins_path(options))
    text = docs.page(chosen_series(options, root, loaded), loaded.upstreams)
    return settle(options, {root / "docs" / "patches.md": text}, docs.COMMAND)
