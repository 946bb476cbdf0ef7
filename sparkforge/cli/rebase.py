"""rebase."""

from __future__ import annotations

from sparkforge.cli.parser import Parents, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    rebase = subparsers.add_parser(
        "rebase",
        parents=groups.project,
        help="move a series to another release; without options: show progress",
    )
    rebase.add_argument("upstream", nargs="?", help="upstream whose series to move")
    rebase.add_argument("--all", action="store_true", help="try every upstream; change nothing")
    rebase.add_argument(
        "--onto",
        metavar="WHERE",
        help="new base: TAG, full commit SHA, release:VERSION, release:FILE or latest;"
        " with --all also latest:N for the N newest",
    )
    rebase.add_argument(
        "--dry-run", action="store_true", help="show the result without changing files"
    )
    rebase.add_argument("--table", action="store_true", help="with --all: write docs/carry.md")
    rebase.add_argument("--commit", metavar="SHA", help="commit that the release was built from")
    rebase.add_argument(
        "--test",
        action="store_true",
        help="run the tests that the patches name when the rebase is done",
    )
    answer = rebase.add_mutually_exclusive_group()
    answer.add_argument(
        "--continue", action="store_true", dest="go_on", help="continue a stopped or killed rebase"
    )
    answer.add_argument("--skip", metavar="REASON", help="drop the patch that stopped the rebase")
    answer.add_argument(
        "--abort",
        action="store_true",
        help="cancel the rebase; patches/ and pins.yaml stay as they are",
    )
    rebase.set_defaults(entry=later("sparkforge.maintain.rebase.command"))
