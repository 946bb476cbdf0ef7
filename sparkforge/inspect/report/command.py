"""report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.core import pages
from sparkforge.core.command import Entry, needed, option
from sparkforge.core.disk import write_file
from sparkforge.core.log import log
from sparkforge.inspect.report import claims
from sparkforge.inspect.report.gather import Gathered, gather
from sparkforge.sources.project import Checkout, checkout, pins_option

_MARKS = {"ok": "good", "faster": "good", "fail": "bad", "slower": "bad"}
"""Colour of a cell, by its word."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``report``."""

    target: str = needed("target whose last build to report on", metavar="NAME")
    out: Path | None = option(
        "write the page here (default: dist/TARGET/report.html)", type=Path, metavar="FILE"
    )
    pins: Path | None = pins_option()
    output: OutputOptions


def _report(options: Options) -> int:
    """Write the page."""
    here = checkout(options.pins)
    page = page_of(here, options.target)
    out = options.out or here.root / "dist" / options.target / "report.html"
    write_file(out, page.encode())
    log.info(f"{out}: written")
    log.document({"page": str(out)})
    return 0


def page_of(here: Checkout, name: str) -> str:
    """Return the page about the last build of a target.

    Raises:
        UsageError: the target was not built, or another version wrote a file.
        StaleError: the record of the decode kernels is of another version.
    """
    target = here.pins.target(name)
    used = {name for wheel, plan in target.wheels.items() for name in (wheel, *plan.carries)}
    all_series = [
        series for series in chosen_series(None, here.root, here.pins) if series.upstream in used
    ]
    return html(gather(here, name, all_series))


def html(it: Gathered) -> str:
    """Return the page: one file without scripts, that needs no network."""
    return pages.render(
        Path(__file__).with_name("page.html.j2"),
        it=it,
        made=sum(step.state == "made" for step in it.steps),
        machines=claims.MACHINES,
        levels=claims.LEVELS,
        counts=claims.count(it.areas),
        marks=_MARKS,
        plain=_plain,
    )


def _plain(markdown: str) -> str:
    """Return a claim's Markdown as text: links and code become their text."""
    return _LINK.sub(r"\1", markdown).replace("`", "").replace("\\", "")


COMMANDS = (
    Entry(
        "report",
        Options,
        _report,
        description="Write one self-contained HTML page about the last build of a target: steps,"
        " files, patches, kernels, results of bench and accept, and what was tested where.",
    ),
)
