"""The page about one rebase: verdicts, what no longer agrees, and the range-diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        move.patch.removesuffix(".patch"), f"{mark}{move.verdict.value}{remembered}", move.next,
    )  # fmt: skip


def page(state: State, chapters: Sequence[Chapter], found: Sequence[Companion]) -> str:
    """Return the page as Markdown."""
    own = state.legs[0]
    out = [f"# {own.upstream} {own.pinned['tag']} → {own.goal.tag}", ""]
    out += [f"From {own.old.origin} to {own.new.origin}.", ""]
    for chapter in chapters:
        leg = chapter.leg
        out += [f"## {leg.upstream}", ""]
        out += ["| patch | verdict | what was found |", "| --- | --- | --- |"]
        for move in leg.moves:
            name, verdict, _ = row(move)
            said = [*move.detail, *move.culprits]
            if move.reason is not None:
                said.append(f"left out: {move.reason}")
            out.append(f"| {name} | {verdict} | {'<br>'.join(said).replace('|', '&#124;')} |")
        out.append("")
    out += ["## What no longer agrees", ""]
    out += [f"* {one.what}: {one.mend}" for one in found] or ["Nothing."]
    for chapter in chapters:
        # a fence longer than any in the text
        out += ["", f"## Range-diff of {chapter.leg.upstream}", "", "````````diff",
                chapter.range_diff, "````````"]  # fmt: skip
    return "\n".join(out) + "\n"
