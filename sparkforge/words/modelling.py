"""model."""

from __future__ import annotations

import argparse

from sparkforge.words.parents import Parents, Parser, Subparsers


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about the model that a target serves."""
    model = subparsers.add_parser("model", help="download a target's model beforehand")
    actions = model.add_subparsers(dest="action", required=True, metavar="ACTION",
                                   parser_class=Parser)  # fmt: skip
    fetch = actions.add_parser(
        "fetch", parents=[groups.shared],
        help="download it to where Compose looks, with the target's image",
    )  # fmt: skip
    fetch.add_argument("--target", required=True, metavar="NAME", help="whose model")
    fetch.add_argument("--dry-run", action="store_true", help="say what and where, do nothing")
    fetch.set_defaults(run=_fetch)


def _fetch(options: argparse.Namespace) -> int:
    from sparkforge import modelfetch  # no other command needs it

    return modelfetch.run(options)
