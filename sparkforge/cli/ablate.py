"""ablate."""

from __future__ import annotations

from pathlib import Path

from sparkforge.cli.parser import Parents, Subparsers, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that leaves patches out."""
    ablate = subparsers.add_parser(
        "ablate",
        parents=groups.project,
        help="check that tests notice a missing patch; find the patch that breaks something",
    )
    ablate.add_argument(
        "patch", nargs="*", help="patches to leave out, one at a time (default: each)"
    )
    ablate.add_argument("--without", metavar="A,B", help="leave these patches out together")
    ablate.add_argument(
        "--bisect",
        nargs="?",
        const="",
        metavar="COMMAND",
        help="find the patch at which a command starts to fail or to pass: a"
        " shell command, the arguments after --, or --smoke",
    )
    ablate.add_argument("--upstream", metavar="NAME", help="limit to the series of this upstream")
    ablate.add_argument(
        "--merge-only",
        action="store_true",
        help="only check that the other patches still merge; run no tests",
    )
    ablate.add_argument(
        "--smoke",
        action="store_true",
        help="run the target's smoke test instead of the patches' tests",
    )
    ablate.add_argument(
        "--target", metavar="NAME", help="target whose wheels, environment or smoke test to use"
    )
    ablate.add_argument(
        "--provide",
        choices=("trees", "wheels", "environment"),
        default="trees",
        help="what to build before the command runs (default: trees)",
    )
    for end in ("good", "bad"):
        ablate.add_argument(
            f"--{end}",
            metavar="PATCH",
            help=f"with --bisect: {end} with the patches up to this one; or none, all",
        )
    ablate.add_argument(
        "--again",
        action="store_true",
        help="with --bisect: ignore the results of an interrupted run",
    )
    ablate.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="Python with pytest (default: .venv-dev, created if missing)",
    )
    ablate.set_defaults(entry=later("sparkforge.maintain.ablate.command"), arguments=())
