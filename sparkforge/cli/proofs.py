"""proofs."""

from __future__ import annotations

from sparkforge.cli.parser import Parents, Subparsers, count, later


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    proofs = subparsers.add_parser(
        "proofs",
        parents=groups.project,
        help="compile, disassemble and check the GPU kernels",
    )
    proofs.add_argument("names", nargs="*", metavar="NAME", help="proofs to run (default: all)")
    proofs.add_argument("--ci", action="store_true", help="run the smallest sufficient set")
    proofs.add_argument("--list", action="store_true", help="list the proofs and exit")
    proofs.add_argument(
        "--jobs",
        type=count,
        default=None,
        metavar="N",
        help="parallel compilers (default: as many as fit in memory)",
    )
    proofs.add_argument(
        "--record",
        action="store_true",
        help="write what the decode kernels do into the checkout; `build.py docs` uses it",
    )
    proofs.set_defaults(entry=later("sparkforge.inspect.proofs.command"))
