"""doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkforge.words.parents import Parents, Subparsers, positive


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command that looks at the machine."""
    doctor = subparsers.add_parser(
        "doctor",
        parents=[groups.shared],
        help="will this machine build and serve a target, and if not, what to do",
    )
    doctor.add_argument("--target", metavar="NAME",
                        help="for which (default: what this machine looks like)")  # fmt: skip
    doctor.add_argument("--model", type=Path, metavar="DIR",
                        help="look at this checkpoint, not at the hub's cache")  # fmt: skip
    doctor.add_argument("--cluster", action="store_true",
                        help="the pair of which this is one, too; run it on both")  # fmt: skip
    doctor.add_argument("--wait", type=positive, metavar="SECONDS",
                        help="--cluster: for the other side (default: 30)")  # fmt: skip
    record = doctor.add_mutually_exclusive_group()
    record.add_argument("--save", type=Path, metavar="FILE",
                        help="write what was read, too: for a report")  # fmt: skip
    record.add_argument("--readings", type=Path, metavar="FILE",
                        help="judge what --save wrote on another machine")  # fmt: skip
    record.add_argument("--report", type=Path, nargs="?", default=False, metavar="FILE",
                        help="pack all that a first run tells into an archive: readings, logs,"
                        " chats (default: sparkforge-report-TIME.tar.gz)")  # fmt: skip
    doctor.add_argument("--no-chats", action="store_true",
                        help="--report: ask the server nothing")  # fmt: skip
    how = doctor.add_mutually_exclusive_group()
    how.add_argument("--docs", action="store_true", help="write the table in docs/doctor.md")
    how.add_argument("--check", action="store_true", help="fail where that table is stale")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from sparkforge.doctor import command  # no other command needs it

    return command.run(options)
