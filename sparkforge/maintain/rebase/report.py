"""The page about one rebase: verdicts, pins that no longer agree, and the range-diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import pages
from sparkforge.maintain.companions import trial
from sparkforge.maintain.companions.move import Move
from sparkforge.maintain.rebase.drift import DependencyDrift
from sparkforge.maintain.rebase.state import SeriesRebase, State
from sparkforge.maintain.rebase.verdicts import PatchResult

HEAD = ("patch", "verdict", "what next")


@dataclass(frozen=True)
class ReportSection:
    """One series: its new release, and git's range-diff of before and after."""

    part: SeriesRebase
    range_diff: str


def file_name(part: SeriesRebase) -> str:
    """Return the name of the page about a part."""
    return f"{part.upstream}-{part.pinned['version']}-{part.target.version}.md"


def row(result: PatchResult) -> tuple[str, str, str]:
    """Return a result as a row of the table."""
    remembered = " (remembered)" if result.remembered else ""
    mark = "! " if result.stops else ""
    return (
        result.patch.removesuffix(".patch"),
        f"{mark}{result.verdict.value}{remembered}",
        result.next,
    )


def page(
    state: State,
    sections: Sequence[ReportSection],
    drifts: Sequence[DependencyDrift],
    move: Move | None,
) -> str:
    """Return the page as Markdown."""
    return pages.render(
        Path(__file__).with_name("report.md.j2"),
        own=state.parts[0],
        sections=sections,
        drifts=drifts,
        moved=[part for part in state.parts[1:] if part.upstream in state.moved],
        move=move,
        test_head=trial.HEAD,
        test_rows=[] if move is None else [trial.row(result) for result in move.tried.tests],
        rows=lambda part: [_found(result) for result in part.results],
        raw=pages.Markdown,
    )


def _found(result: PatchResult) -> tuple[str, ...]:
    name, verdict, _ = row(result)
    lines = [*result.detail, *result.causes]
    if result.reason is not None:
        lines.append(f"left out: {result.reason}")
    return (name, verdict, pages.Markdown("<br>".join(map(pages.escape, lines))))
