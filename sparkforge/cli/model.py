"""model."""

from __future__ import annotations

from sparkforge.cli.parser import Parents, Parser, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about the model that a target serves."""
    model = subparsers.add_parser("model", help="download a target's model in advance")
    actions = model.add_subparsers(
        dest="action", required=True, metavar="ACTION", parser_class=Parser
    )
    fetch = actions.add_parser(
        "fetch",
        parents=[groups.pins, groups.output],
        help="download the model to where Compose looks for it",
    )
    fetch.add_argument(
        "--target", required=True, metavar="NAME", help="target whose model to download"
    )
    fetch.add_argument(
        "--dry-run", action="store_true", help="print the model and the folder, and exit"
    )
    fetch.set_defaults(entry=later("sparkforge.build.modelfetch"))
