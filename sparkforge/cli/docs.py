"""docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.build.options import OutputOptions, chosen_series
from sparkforge.cli.parser import Parents, Subparsers, here
from sparkforge.core import generated
from sparkforge.core.log import log
from sparkforge.pins import pins
from sparkforge.pins.pins import Pins
from sparkforge.sources.project import recover_checkout

_ROOFLINE_TARGET = "spark"


@dataclass(frozen=True)
class Options:
    """Options of ``docs``."""

    check: bool
    pins: Path | None
    output: OutputOptions


def register(subparsers: Subparsers, groups: Parents) -> None:
    """Add the command."""
    docs = subparsers.add_parser(
        "docs",
        parents=[groups.pins, groups.output],
        help="write the pages that the checkout generates",
        description="Write docs/patches.md, docs/roofline.md with its picture, and the tables in"
        " docs/decode-kernels.md and docs/doctor.md. (docs/carry.md follows the upstreams'"
        " releases: build.py rebase --all --onto latest:6 --table)",
    )
    docs.add_argument("--check", action="store_true", help="fail if one is stale; write nothing")
    docs.set_defaults(entry=here(Options, _docs))


def _docs(options: Options) -> int:
    """Write the pages, or compare them with the files."""
    path = recover_checkout(options.pins)
    pages = _pages(path.parent, pins.load(path))
    changed = generated.settle(pages, generated.COMMAND, check=options.check)
    for page in pages:
        log.info(f"{page}: {'written' if page in changed else 'up to date'}")
    if options.output.json:
        log.json({"written": [str(page) for page in changed]})
    return 0


def _pages(root: Path, all_pins: Pins) -> Mapping[Path, str]:
    """Return the text of every generated page."""
    from sparkforge.inspect.doctor import command as doctor
    from sparkforge.inspect.perf import kerneltable, kernelwork, rooflinepicture, rooflinetable
    from sparkforge.series import docs

    folder = root / "docs"
    case = rooflinetable.case(all_pins.target(_ROOFLINE_TARGET), _ROOFLINE_TARGET)
    patches = chosen_series(None, root, all_pins)
    recorded = kernelwork.load()
    for one in patches:
        if (pin := all_pins.upstream(one.upstream).kernels) is not None:
            kernelwork.check(recorded, one, pin.folder)
    return {
        folder / "patches.md": docs.page(patches, all_pins.upstreams),
        folder / "roofline.md": generated.between(
            folder / "roofline.md", rooflinetable.markdown(case)
        ),
        folder / "roofline.svg": rooflinepicture.svg(case),
        folder / "decode-kernels.md": generated.between(
            folder / "decode-kernels.md", kerneltable.markdown(recorded)
        ),
        folder / "doctor.md": generated.between(folder / "doctor.md", doctor.markdown()),
    }
