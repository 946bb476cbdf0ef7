"""dev."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.words.parents import Parents, Subparsers


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command for working on the patches of a target."""
    dev = subparsers.add_parser(
        "dev", parents=[groups.shared, groups.sources, groups.target],
        help="a shell, or -- COMMAND, in which edits of patched work trees act at once",
    )  # fmt: skip
    dev.add_argument("upstream", nargs="*", help="only these work trees (default: the target's)")
    dev.add_argument("--dir", type=Path, metavar="DIR",
                     help="where the work trees lie (default: dev/TARGET)")  # fmt: skip
    dev.set_defaults(run=_dev)


def _dev(options: argparse.Namespace) -> int:
    from sparkforge.dev import command  # no other command needs it

    return command.run(options)
