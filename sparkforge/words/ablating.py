"""ablate."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.words.parents import Parents, Subparsers


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that leaves patches out."""
    ablate = subparsers.add_parser(
        "ablate", parents=[groups.shared, groups.sources],
        help="leave patches out: their own tests must fail then; or find the one that breaks",
    )  # fmt: skip
    ablate.add_argument("patch", nargs="*", help="each of these in turn (default: all)")
    ablate.add_argument("--without", metavar="A,B", help="these patches, all at once")
    ablate.add_argument("--bisect", nargs="?", const="", metavar="COMMAND",
                        help="find the patch with which a command (of the shell's, or behind --)"
                        " or --smoke begins to fail, or to succeed")  # fmt: skip
    ablate.add_argument("--upstream", metavar="NAME", help="only the series of this one")
    ablate.add_argument("--merge-only", action="store_true",
                        help="say whether what is left merges, run nothing")  # fmt: skip
    ablate.add_argument("--smoke", action="store_true",
                        help="run the target's smoke test, not patches' own tests")  # fmt: skip
    ablate.add_argument("--target", metavar="NAME", help="whose wheels, environment, smoke test")
    ablate.add_argument("--provide", choices=("trees", "wheels", "environment"), default="trees",
                        help="what a command needs, made before (default: trees)")  # fmt: skip
    for end in ("good", "bad"):
        ablate.add_argument(f"--{end}", metavar="PATCH",
                            help=f"--bisect: {end} up to this patch; none, all")  # fmt: skip
    ablate.add_argument("--again", action="store_true",
                        help="--bisect: forget what an interrupted run found out")  # fmt: skip
    ablate.add_argument(
        "--python", type=Path, metavar="FILE",
        help="interpreter that has pytest (default: .venv-dev, made where it is missing)",
    )  # fmt: skip
    ablate.set_defaults(run=_ablate)


def _ablate(options: argparse.Namespace) -> int:
    from sparkforge.ablate import command  # no other command needs it

    return command.run(options)
