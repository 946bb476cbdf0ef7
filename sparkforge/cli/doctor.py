"""doctor."""

from __future__ import annotations

from pathlib import Path

from sparkforge.cli.parser import Parents, Subparsers, later, positive


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that looks at the machine."""
    doctor = subparsers.add_parser(
        "doctor",
        parents=[groups.pins, groups.store, groups.output],
        help="check that this machine can build and serve a target",
    )
    doctor.add_argument(
        "--target", metavar="NAME", help="target to check for (default: guessed from the hardware)"
    )
    doctor.add_argument(
        "--model", type=Path, metavar="DIR", help="check this checkpoint instead of the hub's cache"
    )
    doctor.add_argument(
        "--cluster",
        action="store_true",
        help="also check the two-machine setup; run on both machines",
    )
    doctor.add_argument(
        "--wait",
        type=positive,
        metavar="SECONDS",
        help="with --cluster: how long to wait for the other machine (default: 30)",
    )
    record = doctor.add_mutually_exclusive_group()
    record.add_argument(
        "--save", type=Path, metavar="FILE", help="also store the readings, to judge them elsewhere"
    )
    record.add_argument(
        "--readings",
        type=Path,
        metavar="FILE",
        help="judge readings that --save stored on another machine",
    )
    record.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE",
        help="pack readings, logs and test chats into an archive for a bug report"
        " (default: sparkforge-report-TIME.tar.gz)",
    )
    doctor.add_argument(
        "--no-chats", action="store_true", help="with --report: send no test chats to the server"
    )
    doctor.set_defaults(entry=later("sparkforge.inspect.doctor.command"))
