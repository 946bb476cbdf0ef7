"""rebase."""

from __future__ import annotations

import argparse

from sparkforge.words.parents import Parents, Subparsers


def _rebase(options: argparse.Namespace) -> int:
    from sparkforge.rebase import command  # no other command needs it

    return command.run(options)


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    rebase = subparsers.add_parser(
        "rebase", parents=[groups.shared, groups.sources],
        help="move a series to another release; without more words: how far it is",
    )  # fmt: skip
    rebase.add_argument("upstream", nargs="?", help="whose series")
    rebase.add_argument("--all", action="store_true", help="try every upstream; changes nothing")
    rebase.add_argument(
        "--onto", metavar="WHERE",
        help="TAG, full commit SHA, release:VERSION, release:FILE, or latest;"
        " with --all also latest:N, the N newest",
    )  # fmt: skip
    rebase.add_argument("--dry-run", action="store_true", help="say what would become of it")
    rebase.add_argument("--table", action="store_true", help="with --all: write docs/carry.md")
    rebase.add_argument("--commit", metavar="SHA", help="the commit that the release was made from")
    rebase.add_argument("--test", action="store_true",
                        help="once it has landed, run the tests that its patches name")  # fmt: skip
    answer = rebase.add_mutually_exclusive_group()
    answer.add_argument("--continue", action="store_true", dest="go_on",
                        help="go on where it stopped or was killed")  # fmt: skip
    answer.add_argument("--skip", metavar="REASON", help="leave the stopped patch out")
    answer.add_argument("--abort", action="store_true", help="forget it; nothing was changed")
    rebase.set_defaults(run=_rebase)
