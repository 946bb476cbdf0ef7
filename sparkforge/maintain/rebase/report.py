"""The page about one rebase: verdicts, what no longer agrees, and the range-diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages
from sparkforge.maintain.rebase.companions import Companion
from sparkforge.maintain.rebase.state import Leg, State
from sparkforge.maintain.rebase.verdicts import Move

HEAD = ("patch", "verdict", "what next")


@dataclass(frozen=True)
class Chapter:
    """One series: where it went, and git's range-diff of before and after."""

    leg: Leg
    range_diff: str


def file_name(leg: Leg) -> str:
    """Return the name of the page about a leg."""
    return f"{leg.upstream}-{leg.pinned['version']}-{leg.goal.version}.md"


def row(move: Move) -> tuple[str, str, str]:
    """Return a move as a row of the table."""
    remembered = " (remembered)" if move.remembered else ""
    mark = "! " if move.stops else ""
    return (
        move.patch.removesuffix(".patch"),
        f"{mark}{move.verdict.value}{remembered}",
        move.next,
    )


def page(state: State, chapters: Sequence[Chapter], found: Sequence[Companion]) -> str:
    """Return the page as Markdown."""
    return pages.render(
        Path(__file__).with_name("report.md.j2"),
        own=state.legs[0],
        chapters=chapters,
        found=found,
        rows=lambda leg: [_found(move) for move in leg.moves],
        raw=pages.Markdown,
    )


def _found(move: Move) -> tuple[str, ...]:
    name, verdict, _ = row(move)
    said = [*move.detail, *move.culprits]
    if move.reason is not None:
        said.append(f"left out: {move.reason}")
    return (name, verdict, pages.Markdown("<br>".join(map(pages.escape, said))))
