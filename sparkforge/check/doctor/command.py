"""``build.py doctor``: arguments → readings → findings → text or JSON, and the exit code."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cyclopts import Parameter

from sparkforge.build.options import OutputOptions
from sparkforge.check.doctor import archive, disk, gpu, host, model, pair, readings
from sparkforge.check.doctor.check import Finding, compare, judge
from sparkforge.check.doctor.readings import Machine
from sparkforge.check.doctor.wanted import wanted
from sparkforge.core import plain
from sparkforge.core.errors import CheckError, UsageError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.sources.project import PinsFile, checkout, store_of

MODULES = (host, gpu, disk, model, pair)
"""Modules whose import registers checks."""
_MARKS = {
    "ok": ("32", "✓"),
    "not checked": ("2", "·"),
    "warning": ("33", "!"),
    "error": ("31;1", "✗"),
}
_ORDER = list(_MARKS)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``doctor``."""

    target: str | None = None
    """target to check for (default: spark on arm64, else cpu)"""
    compare: Path | None = None
    """compare with the output of doctor --json on the other of two machines"""
    readings: Path | None = None
    """judge the readings in an archive of --report"""
    report: bool = False
    """pack readings, findings and logs into sparkforge-report-TIME.zip for a bug report"""
    pins: PinsFile = None
    store: Path | None = None
    """cache folder (default: $SPARKFORGE_STORE, else ~/.cache/sparkforge)"""
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Read the machine, judge, print; the code is that of CheckError if the target cannot work.

    With a report the code is 0 for any findings.
    """
    here = checkout(options.pins)
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    want = wanted(here.pins, options.target or likely)
    if options.report and options.readings is not None:
        raise UsageError("--report and --readings conflict", "give only one")
    path = archive.new_path(Path.cwd()) if options.report else None
    theirs = None if options.compare is None else _findings(options.compare)
    recorded = None
    if options.readings is not None:
        try:
            recorded = readings.load(archive.readings_in(options.readings))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"not a recording: {error}"
            hint = "create one with build.py doctor --report FILE"
            raise UsageError(f"--readings {options.readings}: {why}", hint) from None
    seen = Machine(here.root, store_of(options.store).root, recorded)
    findings = judge(seen, want)
    findings += [] if theirs is None else compare(findings, theirs)
    stops = [finding.name for finding in findings if finding.state == "error"]
    document: dict[str, object] = {
        "target": want.target,
        "ok": not stops,
        "counts": Counter(finding.state for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    if not options.output.json:
        show(findings)
    if path is not None:
        files = archive.write(path, seen, want.target, document)
        document["report"] = {"file": str(path), "parts": files}
        log.heading(str(path))
        for name, problem in files.items():
            log.info(f"{name}: {problem}" if problem else name)
        log.info(
            "secrets, serial numbers and names are masked; check the archive before you send it"
        )
    log.document(document)
    if path is not None or not stops:
        return 0
    msg = f"this machine cannot build or serve target {want.target}: {', '.join(stops)}"
    return log.failure(CheckError(msg, "fix the problems above, then run doctor again"))


def show(findings: list[Finding]) -> None:
    """Print findings with their hints, the worst last; equal ones share a line."""
    names: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.state)):
        names.setdefault(replace(finding, name=""), []).append(finding.name)
    for finding, checks in names.items():
        colour, mark = _MARKS[finding.state]
        state = log.painted(colour, f"{mark} {finding.state:11}")
        log.info(f"{state}  {', '.join(checks)}: {finding.seen}")
        if finding.hint:
            log.info(f"{'':15}hint: {finding.hint}")


def _findings(path: Path) -> list[Finding]:
    """Return the findings in a document of ``--json``."""
    try:
        found = plain.json_of(path.read_bytes())
        theirs = plain.load(tuple[Finding, ...], found["findings"])
    except (OSError, ValueError, LookupError, TypeError):
        theirs = None
    if theirs is None:
        hint = "create it on the other machine: build.py doctor --json >FILE"
        raise UsageError(f"--compare {path}: no output of doctor --json", hint)
    return list(theirs)
