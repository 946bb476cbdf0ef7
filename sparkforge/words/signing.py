"""sign, and what verify asks of signatures."""

from __future__ import annotations

import argparse

from sparkforge.words.parents import Parents, Parser, Subparsers


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that signs."""
    sign = subparsers.add_parser(
        "sign", parents=[groups.shared],
        help="cosign signs receipt, checksums, bill and provenance, and an image that was pushed",
    )  # fmt: skip
    sign.add_argument("--target", required=True, metavar="NAME", help="whose newest build")
    sign.add_argument(
        "--key", metavar="FILE",
        help="private key, or its name in a key service as cosign has it; its password:"
        " COSIGN_PASSWORD (default: keyless, with an identity)",
    )  # fmt: skip
    sign.add_argument("--no-log", action="store_true",
                      help="leave the public transparency log out; needs no network")  # fmt: skip
    sign.add_argument("--image", metavar="REPOSITORY@sha256:…",
                      help="the built image where it was pushed: sign it there")  # fmt: skip
    sign.set_defaults(run=_sign)


def trust_options(verify: Parser) -> None:
    """Whose signatures must be there."""
    verify.add_argument("--key", metavar="FILE", help="whose signatures must be there: public key")
    verify.add_argument("--identity", metavar="WHO", help="the same without a key: mail or URI")
    verify.add_argument("--issuer", metavar="URL", help="who vouches for --identity")


def _sign(options: argparse.Namespace) -> int:
    from sparkforge import signing  # no other command needs it

    return signing.run(options)
