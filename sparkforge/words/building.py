"""build, explain, smoke, serve, images, rollback, verify, clean."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge import commands, composing
from sparkforge.context import STAGES
from sparkforge.words.parents import Parents, Parser, Subparsers, target_options
from sparkforge.words.signing import trust_options


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands that make something of a target."""
    shared, sources, target = groups
    build = subparsers.add_parser(
        "build",
        parents=[shared, sources, target],
        help="fetch, patch, build, bake and test; the default",
    )
    build.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage")
    build.add_argument(
        "--force",
        action="append",
        choices=STAGES,
        default=[],
        help="run a stage again although its result is in the store",
    )
    build.add_argument("--dry-run", action="store_true", help="show the plan, do nothing")
    build.set_defaults(run=commands.build)

    explain = subparsers.add_parser(
        "explain",
        parents=[shared, sources, target_options(serves=False)],
        help="what would be made again, and which input changed",
    )
    explain.set_defaults(run=commands.explain)

    smoke = subparsers.add_parser(
        "smoke",
        parents=[shared, sources, target],
        help="run the smoke test again on what was built",
    )
    smoke.set_defaults(run=commands.smoke)

    serve = subparsers.add_parser(
        "serve",
        parents=[shared, sources, target],
        help="serve what was built, on loopback, until Ctrl-C",
    )
    model = serve.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        type=Path,
        default=None,
        metavar="DIR",
        help="checkpoint to serve (default: the tiny one)",
    )
    model.add_argument(
        "--chat", action="store_true",
        help="serve the tiny one that takes chats and tools; its words are built in",
    )  # fmt: skip
    serve.set_defaults(run=commands.serve)

    _image_commands(subparsers, shared)

    verify = subparsers.add_parser(
        "verify", parents=[shared, sources, target_options(required=False, serves=False)],
        help="build a second time, cold: every byte must be the same; or look into an image",
    )  # fmt: skip
    verify.add_argument(
        "image", nargs="?",
        help="say what is in it, and whether this checkout makes it: archive, receipt.json, or a"
        " name that the engine knows; with --key or --identity also a folder of published files"
        " (default: build --target a second time)",
    )  # fmt: skip
    verify.add_argument("--until", choices=("wheels", "image"), default="image",
                        help="compare up to this stage (default: image)")  # fmt: skip
    trust_options(verify)
    verify.set_defaults(run=_verify)

    clean = subparsers.add_parser("clean", parents=[shared], help="empty the store's artefacts")
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="downloads and git mirrors too")
    how.add_argument(
        "--superseded", action="store_true", help="only results that no target's newest build uses"
    )
    clean.set_defaults(run=commands.clean)


def _image_commands(subparsers: Subparsers, shared: Parser) -> None:
    images = subparsers.add_parser(
        "images", parents=[shared], help="what was baked, and which image Compose uses"
    )
    images.add_argument("--target", metavar="NAME", help="of this target only")
    images.set_defaults(run=composing.images)

    rollback = subparsers.add_parser(
        "rollback", parents=[shared], help="have Compose use the image before, or another one"
    )
    rollback.add_argument("--target", required=True, metavar="NAME", help="whose image")
    rollback.add_argument(
        "image", nargs="?", metavar="IMAGE",
        help="a name that `build.py images` lists, with or without what stands before the colon",
    )  # fmt: skip
    rollback.set_defaults(run=composing.rollback)


def _verify(options: argparse.Namespace) -> int:
    from sparkforge import verify  # no other command needs it

    return verify.run(options)
