"""sign."""

from __future__ import annotations

from sparkforge.cli.parser import Parents, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that signs."""
    sign = subparsers.add_parser(
        "sign",
        parents=[groups.pins, groups.output],
        help="sign a build's receipt, checksums, SBOM and provenance with cosign",
    )
    sign.add_argument(
        "--target", required=True, metavar="NAME", help="target whose newest build to sign"
    )
    sign.add_argument(
        "--key",
        metavar="FILE",
        help="private key, or a key service's name as cosign writes it; password in"
        " COSIGN_PASSWORD (default: keyless, by identity)",
    )
    sign.add_argument(
        "--no-log",
        action="store_true",
        help="make no entry in the public transparency log; needs no network",
    )
    sign.add_argument(
        "--image",
        metavar="REPOSITORY@sha256:…",
        help="also sign the image in the registry that it was pushed to",
    )
    sign.set_defaults(entry=later("sparkforge.inspect.verify.signing"))
