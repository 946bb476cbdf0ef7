"""``build.py doctor``: arguments → readings → findings → table or JSON, and the exit code."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from sparkforge.build.options import OutputOptions
from sparkforge.core import pages
from sparkforge.core.command import Entry, option, positive, switch
from sparkforge.core.errors import DoctorError, UsageError
from sparkforge.core.log import log
from sparkforge.inspect.doctor import (
    checkpoint,
    containers,
    gpu,
    machine,
    pair,
    pairreading,
    reading,
    reporting,
    rights,
    storage,
)
from sparkforge.inspect.doctor.checkpoint import Checkpoint
from sparkforge.inspect.doctor.finding import CHECKS, STATES, Finding
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.inspect.doctor.wanted import Wanted, wanted
from sparkforge.pins.types import MACHINES
from sparkforge.serving.checkpoint import expanded
from sparkforge.serving.cluster import ClusterError, Settings, settings
from sparkforge.sources.project import checkout, pins_option, store_of, store_option

Probe = Callable[[Readings, Wanted], Iterator[Finding]]
PROBES: tuple[Probe, ...] = (*machine.PROBES, *gpu.PROBES, *storage.PROBES, *containers.PROBES)
_OF_THE_PLATFORM = ("gpu", "memory", "engine")  # themes of findings
_WAIT_S = 30.0  # for the other side of a pair
_MARKS = {"ok": ("32", "✓"), "note": ("2", "·"), "warn": ("33", "!"), "fail": ("31;1", "✗")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``doctor``."""

    target: str | None = option(
        "target to check for (default: guessed from the hardware)", metavar="NAME"
    )
    model: Path | None = option(
        "check this checkpoint instead of the hub's cache", type=Path, metavar="DIR"
    )
    cluster: bool = switch("also check the two-machine setup; run on both machines")
    wait: float | None = option(
        "how long to wait for the other machine (default: 30)",
        needs="--cluster",
        type=positive,
        metavar="SECONDS",
    )
    save: Path | None = option(
        "also store the readings, to judge them elsewhere",
        type=Path,
        metavar="FILE",
        one_of="readings",
    )
    readings: Path | None = option(
        "judge readings that --save stored on another machine",
        type=Path,
        metavar="FILE",
        one_of="readings",
    )
    report: str | None = option(
        "pack readings, logs and test chats into an archive for a bug report"
        " (default: sparkforge-report-TIME.tar.gz)",
        nargs="?",
        const="",
        metavar="FILE",
        one_of="readings",
    )
    """"" for a file with the time in its name."""
    no_chats: bool = switch("send no test chats to the server", needs="--report")
    pins: Path | None = pins_option()
    store: Path | None = store_option()
    output: OutputOptions


def run(options: Options) -> int:
    """Read the machine, judge, print; return 18 if something would stop the target.

    With a report the code is 0 for any findings.
    """
    here = checkout(options.pins)
    # of a machine of this kind; the probes look for a GPU
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    want = wanted(here.pins, options.target or likely)
    archive = None
    if options.report is not None:
        archive = reporting.path_of(options.report, Path.cwd())
    env_file = here.root / ".env"
    seen = _recorded(options.readings) if options.readings else _read(options, want, env_file)
    if options.save:
        try:
            options.save.write_text(seen.dumps() + "\n", encoding="utf-8")
        except OSError as refusal:
            msg = f"--save {options.save}: {refusal.strerror}"
            raise UsageError(msg, "give a writable file") from None
    probes = PROBES
    if options.cluster:
        if options.readings:
            raise UsageError("--cluster checks this machine, --readings another", "omit --readings")
        mine = _settings(seen)
        if want.memory:  # each machine holds half of the model
            want = dataclasses.replace(want, memory=want.memory.split(2))
        both = pairreading.take(mine, seen, want, min(options.wait or _WAIT_S, 3600))
        probes = (*PROBES, lambda seen, want: pair.judge(both, seen, rdma=want.gpu))
    findings = relevant(judge(seen, want, probes))
    stops = [finding for finding in findings if finding.state == "fail"]
    judgement = document(want.target, findings)
    if not options.output.json:
        show(want.target, findings)
    if archive is not None:
        everything = reading.all_variables(env_file)
        made = reporting.write(
            archive, here.root, want.target, seen, judgement, everything, ask=not options.no_chats
        )
        judgement["report"] = reporting.document(archive, made)
        reporting.show(archive, made)
    log.document(judgement)
    if archive is not None or not stops:
        return 0
    names = ", ".join(finding.name for finding in stops)
    hint = "run the hint of each finding, then doctor again"
    error = DoctorError(f"this machine cannot build or serve target {want.target}: {names}", hint)
    return log.failure(error)


def _settings(seen: Readings) -> Settings:
    try:
        mine = settings(seen.variables)
    except ClusterError as error:
        raise UsageError(str(error), "see docs/several-sparks.md") from None
    if mine is None:
        msg = "SPARKFORGE_CLUSTER_ROLE is not set: this machine is not part of a pair"
        raise UsageError(msg, "set it to head or worker in .env; see docs/several-sparks.md")
    return mine


def judge(seen: Readings, want: Wanted, probes: Iterable[Probe]) -> list[Finding]:
    """Run every probe; a failed one does not affect others."""
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings += probe(seen, want)
        except Exception as error:  # a machine may report anything: the other probes still count
            log.detail(f"{probe.__name__}: {type(error).__name__}: {error}")
            findings.append(
                Finding(
                    "doctor",
                    "warn",
                    f"{probe.__name__} failed: {type(error).__name__}: {error}",
                    "python3 build.py doctor --save readings.json   # and report it",
                )
            )
    if seen.late:
        findings.append(
            Finding(
                "doctor",
                "warn",
                f"no answer in time: {', '.join(seen.late)}",
                "df -h; dmesg | tail",
            )
        )
    order = list(CHECKS)
    return sorted(findings, key=lambda finding: order.index(finding.name))


def relevant(findings: Iterable[Finding]) -> list[Finding]:
    """Remove findings that only follow from another platform than the target's."""
    found = list(findings)
    if not any(finding.name == "architecture" and finding.state == "fail" for finding in found):
        return found
    return [finding for finding in found if CHECKS[finding.name].theme not in _OF_THE_PLATFORM]


def document(target: str, findings: Iterable[Finding]) -> dict[str, object]:
    """Return the document of ``--json``; docs/doctor.md describes it."""
    found = list(findings)
    counts = {state: sum(finding.state == state for finding in found) for state in STATES}
    return {
        "target": target,
        "ok": counts["fail"] == 0,
        "counts": counts,
        "findings": [finding.as_json() for finding in found],
    }


def show(target: str, findings: Iterable[Finding]) -> None:
    """Print findings by theme, each with its reading and its hint."""
    theme = ""
    for finding in findings:
        check = CHECKS[finding.name]
        if check.theme != theme:
            theme = check.theme
            log.heading(theme)
        colour, mark = _MARKS[finding.state]
        log.info(
            f"{log.painted(colour, f'{mark} {finding.state:4}')}  {finding.name}: {finding.seen}"
        )
        if finding.state in ("warn", "fail"):
            log.info(f"          why   {check.why}")
        if finding.remedy:
            log.info(f"          hint  {finding.remedy}")


def markdown() -> str:
    """Return the table of all checks."""
    # the texts of the checks are Markdown
    return pages.table(
        ("finding", "what is read", "more than a note", "why"),
        [
            (f"`{name}`", *map(pages.Markdown, (check.what, check.worse or "never", check.why)))
            for name, check in CHECKS.items()
        ],
    )


def _recorded(path: Path) -> Readings:
    try:
        return Readings.loads(reporting.readings_in(path) or path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "give a file from --save or --report"
        raise UsageError(f"{path}: {error.strerror}", hint) from None
    except ValueError as error:
        msg = f"{path} is not a recording: {error}"
        raise UsageError(msg, "create one with build.py doctor --save FILE") from None


def _read(options: Options, want: Wanted, env_file: Path) -> Readings:
    variables = reading.variables(env_file)
    hub, may = _hub(variables), None
    if want.model is None and options.model is None:
        look: Callable[[], Checkpoint] | None = None
    elif options.model is not None:
        folder = options.model.resolve()
        if not folder.is_dir():
            raise UsageError(
                f"--model {options.model}: no such folder", "give the folder of a checkpoint"
            )
        look = lambda: checkpoint.read_folder(folder)  # noqa: E731
    else:
        assert want.model is not None
        _, repository, revision = want.model
        look = lambda: checkpoint.read(hub, repository, revision)  # noqa: E731
        if storage.folder_for_compose(variables):
            may = lambda: rights.read(hub.parent, repository)  # noqa: E731
    return reading.take(
        store=store_of(options.store).root,
        model=hub,
        env_file=env_file,
        checkpoint=look,
        rights=may,
    )


def _hub(variables: Mapping[str, str]) -> Path:
    """Return the hub's cache of Compose, if it is a folder of the host, else huggingface_hub's."""
    if chosen := variables.get("SPARKFORGE_HF_CACHE"):
        return expanded(chosen) / "hub"
    if chosen := variables.get("HF_HUB_CACHE"):
        return expanded(chosen)
    home = variables.get("HF_HOME") or "~/.cache/huggingface"
    return expanded(home) / "hub"


COMMANDS = (Entry("doctor", Options, run),)
