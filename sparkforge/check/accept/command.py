"""``build.py accept``: a running server → checks → one table, a document, and the exit code."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from pathlib import Path

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from sparkforge import __version__
from sparkforge.build import composing
from sparkforge.build.context import profile_of
from sparkforge.build.options import OutputOptions
from sparkforge.check.accept.checks import CHECKS, STATES
from sparkforge.check.accept.server import Subject, container_of
from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import client
from sparkforge.sources.project import PinsFile, checkout

_MARKS = {"ok": ("32", "✓"), "not checked": ("2", "·"), "fail": ("31;1", "✗")}


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``accept``."""

    target: str | None = None
    """target that the server was built as (default: the one that Compose serves)"""
    url: str | None = None
    """URL of the server (default: Compose's address and port on this machine)"""
    log: Path | None = None
    """file with the server's output, to check backends (default: the log of Compose's container)"""
    long_prompt: PositiveInt = 100_000
    """most tokens of the long prompt (default: 100000)"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Check a running server; ServerError if it breaks a promise or does not answer."""
    here = checkout(options.pins)
    variables = composing.seen(here.root / ".env")
    names = (variables.get("COMPOSE_PROFILES") or "").split(",")
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    served = next((name.strip() for name in names if name.strip() in here.pins.targets), likely)
    target = options.target or served
    profile = profile_of(here.pins, target)
    if options.log is not None and not options.log.is_file():
        raise UsageError(f"--log {options.log}: no such file", "give the server's log")
    place = client.place_of(variables, options.url)
    model = client.served_model(place)
    container = container_of(place)
    subject = Subject(place, model, profile, container, options.log, options.long_prompt)
    log.heading(f"{model.name} at {place.url}")
    rows = []
    for check in CHECKS:
        log.detail(f"{check.name} …")
        row = check.run(subject)
        colour, mark = _MARKS[row.state]
        log.info(f"{log.painted(colour, mark)} {row.name}  {row.seconds:.1f} s  {row.seen}")
        if row.state == "fail":
            log.info(f"  hint: {row.hint}")
        rows.append(row)
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    log.info(", ".join(f"{number} {state}" for state, number in counts.items()))
    report = {
        "target": target,
        "version": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "url": place.url,
        "model": model.name,
        "max_model_len": model.max_len,
        "image": container.image,
        "ok": not counts["fail"],
        "counts": counts,
        "checks": [dataclasses.asdict(row) for row in rows],
    }
    name = f"accept-{report['when']}.json".replace(":", "")
    file = here.root / "dist" / target / "accept" / name
    write_file(file, f"{json.dumps(report, indent=1)}\n".encode())
    table = pages.table(
        ("check", "result", "what was seen"), [(row.name, row.state, row.seen) for row in rows]
    )
    page = f"# Acceptance of {pages.escape(model.name)}, {report['when']}\n\n{table}\n"
    write_file(file.with_suffix(".md"), page.encode())
    log.info(f"report   {file}")
    if options.output.json:
        log.json({**report, "report": str(file)})
    failed = [row.name for row in rows if row.state == "fail"]
    if not failed:
        return 0
    msg = f"the server fails {len(failed)} of {len(rows)} checks: {', '.join(failed)}"
    return log.failure(ServerError(msg, "follow the hints above"))


def markdown() -> str:
    """Return the table of all checks."""
    return pages.table(
        ("check", "what has to be true"),
        [(check.name, pages.Markdown(check.what)) for check in CHECKS],
    )
