"""images, rollback."""

from __future__ import annotations

from sparkforge.build import composing
from sparkforge.cli.parser import Parents, Subparsers, here


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the commands about the images of past builds."""
    images = subparsers.add_parser(
        "images",
        parents=[groups.pins, groups.output],
        help="list built images and the one that Compose uses",
    )
    images.add_argument("--target", metavar="NAME", help="list only this target's images")
    images.add_argument(
        "--prune",
        action="store_true",
        help="remove images older than the one before the one that Compose uses",
    )
    images.add_argument(
        "--dry-run", action="store_true", help="with --prune: print the images and exit"
    )
    images.set_defaults(entry=here(composing.ImagesOptions, composing.images))

    rollback = subparsers.add_parser(
        "rollback",
        parents=[groups.pins, groups.output],
        help="switch Compose to the previous image, or to another",
    )
    rollback.add_argument(
        "--target", required=True, metavar="NAME", help="target whose image to switch"
    )
    rollback.add_argument(
        "image",
        nargs="?",
        metavar="IMAGE",
        help="image or tag from `build.py images` (default: the previous image)",
    )
    rollback.set_defaults(entry=here(composing.RollbackOptions, composing.rollback))
