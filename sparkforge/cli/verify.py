"""verify."""

from __future__ import annotations

from sparkforge.cli.parser import Parents, Parser, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    verify = subparsers.add_parser(
        "verify",
        parents=[*groups.project, groups.last_variant, groups.tools],
        help="rebuild from scratch and compare every byte; or check an image",
    )
    verify.add_argument("--target", metavar="NAME", help="target to rebuild and compare")
    verify.add_argument(
        "image",
        nargs="?",
        help="check that this checkout builds this image: an archive, a receipt.json or a name"
        " that the engine knows; with --key or --identity also a folder of published files"
        " (default: rebuild --target and compare)",
    )
    verify.add_argument(
        "--until",
        choices=("wheels", "image"),
        default="image",
        help="compare up to this stage (default: image)",
    )
    _trust_options(verify)
    verify.set_defaults(entry=later("sparkforge.inspect.verify.command"))


def _trust_options(verify: Parser) -> None:
    """Whose signatures must be there."""
    verify.add_argument("--key", metavar="FILE", help="require signatures by this public key")
    verify.add_argument(
        "--identity",
        metavar="WHO",
        help="require keyless signatures by this identity (e-mail or URI)",
    )
    verify.add_argument("--issuer", metavar="URL", help="OIDC issuer of --identity")
