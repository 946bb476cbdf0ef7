"""docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.core import pages
from sparkforge.core.command import Entry, switch
from sparkforge.core.log import log
from sparkforge.sources.project import Checkout, checkout, pins_option

_ROOFLINE_TARGET = "spark"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``docs``."""

    check: bool = switch("fail if one is stale; write nothing")
    pins: Path | None = pins_option()
    output: OutputOptions


def _docs(options: Options) -> int:
    """Write the pages, or compare them with the files."""
    wanted = pages_of(checkout(options.pins))
    changed = pages.settle(wanted, pages.COMMAND, check=options.check)
    for page in wanted:
        log.info(f"{page}: {'written' if page in changed else 'up to date'}")
    log.document({"written": [str(page) for page in changed]})
    return 0


def pages_of(here: Checkout) -> Mapping[Path, str]:
    """Return the text of every generated page."""
    from sparkforge.check import report
    from sparkforge.check.accept import command as accept
    from sparkforge.check.perf import kernelrecord, roofline
    from sparkforge.series import docs

    root, all_pins = here.root, here.pins
    folder = root / "docs"
    case = roofline.case(all_pins.target(_ROOFLINE_TARGET), _ROOFLINE_TARGET)
    patches = chosen_series(None, root, all_pins)
    recorded = kernelrecord.load()
    kernels = f"{roofline.markdown(case)}\n\n{kernelrecord.markdown(recorded)}"
    if all_pins.plugin is not None:
        kernelrecord.check(recorded, root, all_pins.plugin)
    return {
        folder / "patches.md": docs.page(patches, all_pins.upstreams),
        folder / "kernels.md": pages.between(folder / "kernels.md", kernels),
        folder / "roofline.svg": roofline.svg(case),
        folder / "status.md": report.status(folder / "status.md"),
        folder / "measure.md": pages.between(folder / "measure.md", accept.markdown()),
    }


COMMANDS = (
    Entry(
        "docs",
        Options,
        _docs,
        description="Write docs/patches.md, docs/roofline.svg, and the tables in docs/kernels.md,"
        " docs/measure.md and docs/status.md.",
    ),
)
