"""The carry table: every patch of every series against several releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.core.log import log
from sparkforge.maintain.rebase import onto
from sparkforge.maintain.rebase.move import verdicts
from sparkforge.maintain.rebase.verdicts import Move
from sparkforge.pins.pins import Pins
from sparkforge.series.series import Series
from sparkforge.sources.sources import Access
from sparkforge.store.store import Store

COMMAND = "rebase --all --onto latest:6 --table"


@dataclass(frozen=True)
class Column:
    """One release, and what would become of each patch on it; None: the pinned one itself."""

    version: str
    moves: tuple[Move, ...] | None


@dataclass(frozen=True)
class Carried:
    """One series against the releases, oldest first."""

    series: Series
    version: str
    columns: tuple[Column, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        return {
            "pinned": self.version,
            "releases": {
                column.version: None
                if column.moves is None
                else [move.as_json() for move in column.moves]
                for column in self.columns
            },
        }


def carried(
    store: Store, pins: Pins, series: Sequence[Series], access: Access, count: int
) -> list[Carried]:
    """Try every series on the newest releases that the index has.

    Args:
        count: so many releases, the pinned one included where it is among them.
    """
    found = []
    for one in series:
        upstream = pins.upstream(one.upstream)
        if not one.patches or upstream.source_file is None:
            continue
        lender = upstream if upstream.source_in is None else pins.upstream(upstream.source_in)
        # the lender's own stand-in says which releases there are; it is the smaller file
        versions = onto.newest(access, lender, count)
        columns = []
        for version in reversed(versions):
            if version == lender.version:
                columns.append(Column(version, None))
                continue
            with log.step(f"{one.upstream} on {version}"):
                goal = onto.resolve(store, pins, one.upstream, f"release:{version}", access)
                old = onto.old_source(store, one.upstream, upstream, goal, access)
                columns.append(
                    Column(
                        version,
                        tuple(
                            verdicts(
                                store,
                                one,
                                old,
                                goal.source,
                                rules=upstream.paths,
                            )
                        ),
                    )
                )
        found.append(Carried(one, lender.version, tuple(columns)))
    return found


def cell(move: Move) -> str:
    """Return a verdict as the table shows it."""
    if move.stops:
        mark = " (follows)" if move.after else ""
        return pages.Markdown(f"**{move.verdict.value}**{mark}")
    return f"{move.verdict.value}{' (remembered)' if move.remembered else ''}"


def rows(one: Carried) -> list[tuple[str, ...]]:
    """Return one series as a table: a row a patch, a column a release."""
    head = (
        "patch",
        *(
            f"{column.version}{' (pinned)' if column.moves is None else ''}"
            for column in one.columns
        ),
    )
    table = [head]
    for at, patch in enumerate(one.series.patches):
        table.append(
            (
                patch.name.removesuffix(".patch"),
                *(
                    "applies" if column.moves is None else cell(column.moves[at])
                    for column in one.columns
                ),
            )
        )
    return table


def page(found: Sequence[Carried]) -> str:
    """Return docs/carry.md."""
    return pages.render(
        Path(__file__).with_name("carry.md.j2"), command=COMMAND, found=found, rows_of=rows
    )
