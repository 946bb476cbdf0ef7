"""``build.py report``: a page about the last build of a target; and the table of docs/status.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from jinja2 import TemplateError
from pydantic import Field, TypeAdapter

from sparkforge.build import receipt
from sparkforge.build.context import release_name
from sparkforge.build.options import OutputOptions, chosen_series, command_options
from sparkforge.core import pages
from sparkforge.core.disk import intact, sha256_file, write_file
from sparkforge.core.errors import UsageError
from sparkforge.core.log import log
from sparkforge.pins.types import Model
from sparkforge.sources.project import PinsFile, checkout


@command_options
class Options:
    target: str
    """target whose last build to report on"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options) -> int:
    """Write the page, HTML without scripts or other files; UsageError without a build."""
    here, name = checkout(options.pins), options.target
    target, folder = here.pins.target(name), here.root / "dist" / name
    if (built := receipt.load(folder / receipt.NAME)) is None:
        msg = f"{folder / receipt.NAME}: missing, or of another version"
        raise UsageError(msg, f"build it: build.py --target {name}")
    used = {each for wheel, plan in target.wheels.items() for each in (wheel, *plan.carries)}
    series = chosen_series(None, here.root, here.pins)
    speeds = *folder.glob("bench/*/result.json"), *folder.glob("bench/*/patched/result.json")
    changed = {file for file, sha in built.files.items() if not intact(folder / file, sha)}
    paths = (max(found, default=None) for found in (folder.glob("accept/*.json"), speeds))
    try:
        accepted, measured = (json.loads(path.read_bytes()) if path else {} for path in paths)
        page = pages.render(
            Path(__file__).with_name("report.html.j2"),
            target=name,
            version=release_name(here.pins, target),
            built=built,
            same_pins=built.pins_sha256 == sha256_file(here.pins_path),
            changed=changed,
            series={one.upstream: one.patches for one in series if one.upstream in used},
            checks=accepted.get("checks", []),
            counts=accepted.get("counts", {}),
            speed=measured.get("tests", {}),
        )
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, TemplateError) as error:
        msg = f"a result in {folder}/accept or /bench is damaged: {error}"
        raise UsageError(msg, "remove it, and run accept or bench again") from None
    out = folder / "report.html"
    write_file(out, page.encode())
    log.info(f"written: {out} (open it in a browser)")
    log.document({"page": str(out)})
    return 0


# -- docs/status.md ----------------------------------------------------------------------

Machine = Literal["x86", "arm64", "h200", "spark"]
Level = Literal["proved", "partly", "simulated", "compiled", "not run"]
_HEAD: Mapping[Machine, str] = {
    "x86": "x86-64",
    "arm64": "arm64, emulated",
    "h200": "H200",
    "spark": "Spark",
}
_Text = Annotated[str, Field(min_length=1)]


class Claim(Model):
    """A feature, and the evidence for it by machine; ``open``: missing tests. Markdown."""

    claim: _Text
    machines: Annotated[Mapping[Machine, Level], Field(min_length=1)]
    tested: _Text
    open: _Text | None = None


class Area(Model):
    """Claims that belong together."""

    area: _Text
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]


def status(path: Path) -> str:
    """Return docs/status.md, from the claims.yaml beside it; UsageError if that is malformed."""
    source = path.with_name("claims.yaml")
    try:
        document = yaml.safe_load(source.read_text(encoding="utf-8"))
        areas = TypeAdapter(tuple[Area, ...]).validate_python(document)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{source}: {error}", "its head describes the values") from None
    text = pages.render(
        Path(__file__).with_name("status.md.j2"),
        areas=areas,
        head=["claim", *_HEAD.values()],
        rows=lambda area: map(_row, area.claims),
        Markdown=pages.Markdown,
    )
    return pages.between(path, text)


def _row(claim: Claim) -> tuple[str, ...]:
    """Return a row of the matrix; ``proved`` and ``not run`` are bold."""
    levels = (claim.machines.get(machine, "") for machine in _HEAD)
    bold = (f"**{one}**" if one in ("proved", "not run") else one for one in levels)
    return tuple(pages.Markdown(text) for text in (claim.claim, *bold))
