"""clean."""

from __future__ import annotations

import argparse

from sparkforge.build.options import store_of
from sparkforge.cli.parser import Parents, Subparsers
from sparkforge.core.log import human_bytes, log


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    clean = subparsers.add_parser(
        "clean", parents=[groups.shared], help="delete build results from the store"
    )
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="delete downloads and git mirrors, too")
    how.add_argument(
        "--superseded",
        action="store_true",
        help="delete only results that no target's newest build uses",
    )
    clean.set_defaults(run=_clean)


def _clean(options: argparse.Namespace) -> int:
    """Empty the store."""
    store = store_of(options)
    superseded, everything = options.superseded, options.all
    log.info(f"cleaning {store.root}; a large store takes minutes")
    freed = store.clean_superseded() if superseded else store.clean(everything=everything)
    log.info(f"freed {human_bytes(freed)}")
    if options.json:
        log.json({"freed_bytes": freed})
    return 0
