"""dev."""

from __future__ import annotations

from pathlib import Path

from sparkforge.cli.parser import Parents, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command for working on the patches of a target."""
    dev = subparsers.add_parser(
        "dev",
        parents=[*groups.project, groups.last_variant, groups.tools],
        help="run a shell, or -- COMMAND, against editable patched work trees",
    )
    dev.add_argument(
        "--target", required=True, metavar="NAME", help="target whose work trees to use"
    )
    dev.add_argument(
        "upstream", nargs="*", help="upstreams whose work trees to use (default: the target's)"
    )
    dev.add_argument(
        "--dir", type=Path, metavar="DIR", help="folder of the work trees (default: dev/TARGET)"
    )
    dev.set_defaults(entry=later("sparkforge.maintain.dev.command"), arguments=())
