"""clean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions
from sparkforge.cli.parser import Parents, Subparsers, here
from sparkforge.core.log import human_bytes, log
from sparkforge.sources.project import store_of


@dataclass(frozen=True)
class Options:
    """Options of ``clean``."""

    store: Path | None
    all: bool
    superseded: bool
    output: OutputOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    clean = subparsers.add_parser(
        "clean", parents=[groups.store, groups.output], help="delete build results from the store"
    )
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="delete downloads and git mirrors, too")
    how.add_argument(
        "--superseded",
        action="store_true",
        help="delete only results that no target's newest build uses",
    )
    clean.set_defaults(entry=here(Options, _clean))


def _clean(options: Options) -> int:
    """Empty the store."""
    store = store_of(options.store)
    superseded, everything = options.superseded, options.all
    log.info(f"cleaning {store.root}; a large store takes minutes")
    freed = store.clean_superseded() if superseded else store.clean(everything=everything)
    log.info(f"freed {human_bytes(freed)}")
    if options.output.json:
        log.json({"freed_bytes": freed})
    return 0
