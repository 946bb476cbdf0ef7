"""watch."""

from __future__ import annotations

from pathlib import Path

from sparkforge.cli.parser import Parents, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that looks for newer releases."""
    watch = subparsers.add_parser(
        "watch",
        parents=groups.project,
        help="look for newer upstream releases and try the series on them",
    )
    watch.add_argument("upstream", nargs="*", help="upstreams to check (default: all)")
    watch.add_argument("--pre", action="store_true", help="include pre-releases")
    watch.add_argument(
        "--known",
        action="append",
        default=[],
        metavar="[UPSTREAM=]VERSION",
        help="ignore this release and older ones; may be repeated",
    )
    watch.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the result to this file as issue text"
    )
    watch.set_defaults(entry=later("sparkforge.maintain.watch.command"))
