"""build, explain, smoke, serve, images, rollback, verify, clean."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.build import composing
from sparkforge.build.context import STAGES
from sparkforge.cli import commands
from sparkforge.cli.parser import Parents, Parser, Subparsers, target_options
from sparkforge.cli.sign import trust_options


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands that make something of a target."""
    shared, sources, target = groups
    build = subparsers.add_parser(
        "build",
        parents=[shared, sources, target],
        help="fetch, patch, build and test (default)",
    )
    build.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage")
    build.add_argument(
        "--force",
        action="append",
        choices=STAGES,
        default=[],
        help="run this stage again even if its result is in the store",
    )
    build.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    build.set_defaults(run=commands.build)

    explain = subparsers.add_parser(
        "explain",
        parents=[shared, sources, target_options(serves=False)],
        help="show what would be rebuilt, and which input changed",
    )
    explain.set_defaults(run=commands.explain)

    smoke = subparsers.add_parser(
        "smoke",
        parents=[shared, sources, target],
        help="repeat the smoke test on the last build",
    )
    smoke.set_defaults(run=commands.smoke)

    serve = subparsers.add_parser(
        "serve",
        parents=[shared, sources, target],
        help="serve the last build on loopback until Ctrl-C",
    )
    model = serve.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="checkpoint to serve (default: a tiny test model)",
    )
    model.add_argument(
        "--chat", action="store_true",
        help="serve a tiny model with canned chat and tool-call replies",
    )  # fmt: skip
    serve.set_defaults(run=commands.serve)

    _image_commands(subparsers, shared)

    verify = subparsers.add_parser(
        "verify", parents=[shared, sources, target_options(required=False, serves=False)],
        help="rebuild from scratch and compare every byte; or check an image",
    )  # fmt: skip
    verify.add_argument(
        "image", nargs="?",
        help="check that this checkout builds this image: an archive, a receipt.json or a name"
        " that the engine knows; with --key or --identity also a folder of published files"
        " (default: rebuild --target and compare)",
    )  # fmt: skip
    verify.add_argument("--until", choices=("wheels", "image"), default="image",
                        help="compare up to this stage (default: image)")  # fmt: skip
    trust_options(verify)
    verify.set_defaults(run=_verify)

    clean = subparsers.add_parser(
        "clean", parents=[shared], help="delete build results from the store"
    )
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="delete downloads and git mirrors, too")
    how.add_argument(
        "--superseded",
        action="store_true",
        help="delete only results that no target's newest build uses",
    )
    clean.set_defaults(run=commands.clean)


def _image_commands(subparsers: Subparsers, shared: Parser) -> None:
    images = subparsers.add_parser(
        "images", parents=[shared], help="list built images and the one that Compose uses"
    )
    images.add_argument("--target", metavar="NAME", help="list only this target's images")
    images.set_defaults(run=composing.images)

    rollback = subparsers.add_parser(
        "rollback", parents=[shared], help="switch Compose to the previous image, or to another"
    )
    rollback.add_argument(
        "--target", required=True, metavar="NAME", help="target whose image to switch"
    )
    rollback.add_argument(
        "image", nargs="?", metavar="IMAGE",
        help="image or tag from `build.py images` (default: the previous image)",
    )  # fmt: skip
    rollback.set_defaults(run=composing.rollback)


def _verify(options: argparse.Namespace) -> int:
    from sparkforge.inspect.verify import command as verify  # no other command needs it

    return verify.run(options)
