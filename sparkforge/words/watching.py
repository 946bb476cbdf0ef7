"""watch."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.words.parents import Parents, Subparsers


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that looks for newer releases."""
    watch = subparsers.add_parser(
        "watch", parents=[groups.shared, groups.sources],
        help="has an upstream a newer release, and would the series carry over?",
    )  # fmt: skip
    watch.add_argument("upstream", nargs="*", help="only these (default: all)")
    watch.add_argument("--pre", action="store_true", help="count pre-releases, too")
    watch.add_argument("--known", action="append", default=[], metavar="[UPSTREAM=]VERSION",
                       help="a release that is no news any more; nor are older ones")  # fmt: skip
    watch.add_argument("--markdown", type=Path, metavar="FILE",
                       help="write the result as the text of an issue")  # fmt: skip
    watch.set_defaults(run=_watch)


def _watch(options: argparse.Namespace) -> int:
    from sparkforge.watch import command  # no other command needs it

    return command.run(options)
