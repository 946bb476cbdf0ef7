"""``build.py accept``: arguments → a running server → checks → one table, and the exit code."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge import __version__
from sparkforge.build.context import profile_of
from sparkforge.build.options import OutputOptions
from sparkforge.core import pages
from sparkforge.core.command import Entry, count, fraction, option, positive
from sparkforge.core.disk import write_file
from sparkforge.core.errors import AcceptError, UsageError
from sparkforge.core.log import log
from sparkforge.inspect.accept import behind, gpqa, load, talk, together
from sparkforge.inspect.accept.row import ACCURACY, STATES, Check, Row, Subject, judged
from sparkforge.pins.pins import Pins
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import client, envfile
from sparkforge.runtime.client import Model, Place
from sparkforge.sources.project import checkout, pins_option

CHECKS: tuple[Check, ...] = (*talk.CHECKS, *together.CHECKS)
_REPORT = Path(__file__).with_name("report.md.j2")
_MARKS = {"ok": ("32", "✓"), "not checked": ("2", "·"), "fail": ("31;1", "✗")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``accept``."""

    target: str | None = option(
        "target that the server was built as (default: the one that Compose serves)",
        metavar="NAME",
    )
    url: str | None = option(
        "URL of the server (default: Compose's address and port on this machine)", metavar="URL"
    )
    log: Path | None = option(
        "file with the server's output, to check backends and memory (default: the log of"
        " Compose's container)",
        type=Path,
        metavar="FILE",
    )
    long_prompt: int = option(
        "most tokens of the long prompt (default: 100000)",
        default=100_000,
        type=count,
        metavar="TOKENS",
    )
    gpqa: Path | None = option(
        "also measure accuracy with this file, gpqa_diamond.csv, as vLLM's CI does; takes long",
        type=Path,
        metavar="FILE",
        group="accuracy",
    )
    gpqa_repeats: int | None = option(
        "how often each question is asked (default: 8)",
        needs="--gpqa",
        type=count,
        metavar="N",
        group="accuracy",
    )
    gpqa_threshold: float | None = option(
        "lowest score that passes, 0 to 1 (default: vLLM's for gpt-oss-20b, none for other models)",
        needs="--gpqa",
        type=fraction,
        metavar="SCORE",
        group="accuracy",
    )
    load: float | None = option(
        "put the server under load for this long, instead of the other checks",
        type=positive,
        metavar="MINUTES",
        group="load",
    )
    clients: int | None = option(
        "clients at once (default: 32)", needs="--load", type=count, metavar="N", group="load"
    )
    pins: Path | None = pins_option()
    output: OutputOptions


def run(options: Options) -> int:
    """Check a running server; 26 if it breaks a promise or does not answer."""
    here = checkout(options.pins)
    variables = envfile.seen(here.root / ".env")
    name = options.target or _served(here.pins, variables)
    profile = profile_of(here.pins, name)
    if options.log is not None and not options.log.is_file():
        raise UsageError(f"--log {options.log}: no such file", "give the server's log")
    questions = None if options.gpqa is None else gpqa.Questions.load(options.gpqa)
    place = client.place_of(variables, options.url)
    subject = Subject(
        place,
        served_model(place),
        profile,
        behind.find(place, options.log),
        options.long_prompt,
    )
    log.heading(f"{subject.model.name} at {place.url}")
    wanted = 0.0
    if questions is not None:  # before the other checks
        wanted = gpqa.threshold(subject.model.name, options.gpqa_threshold)
    if options.load is not None:
        rows = load.run(subject, options.load * 60, options.clients or load.CLIENTS)
    else:
        rows = checked(subject, CHECKS)
    score = kept = None
    folder = here.root / "dist" / name / "accept"
    if questions is not None:
        repeats = options.gpqa_repeats or gpqa.REPEATS
        kept = answers = gpqa.Kept.of(folder, subject, questions, repeats)
        row, score = measured(
            subject, lambda: gpqa.run(subject, questions, wanted, answers, repeats)
        )
        rows.append(row)
    show(rows)
    report = document(name, subject, rows)
    if score is not None:
        report["accuracy"] = score.document()
    file = write(folder, report, rows)
    if kept is not None and score is not None:
        kept.remove()
    log.info(f"report   {_from_here(file)}")
    if options.output.json:
        log.json({**report, "report": str(file)})
    return verdict(rows)


def _from_here(file: Path) -> Path:
    """Return a path relative to the current folder if the file is below it."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _served(all_pins: Pins, variables: Mapping[str, str]) -> str:
    """Return Compose's target in .env, else the one for a machine of this kind."""
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    names = [name.strip() for name in variables.get("COMPOSE_PROFILES", "").split(",")]
    return next((name for name in names if name in all_pins.targets), likely)


def served_model(place: Place) -> Model:
    """Return the model of a running server.

    Raises:
        AcceptError: the server does not answer.
    """
    try:
        return client.model_of(place)
    except ConnectionError:
        msg = f"nothing answers at {place.url}"
        hint = "start it (docker compose up -d), wait until it is healthy, or give --url"
        raise AcceptError(msg, hint) from None
    except (OSError, ValueError) as error:
        msg = f"{place.url}/models: {error}"
        hint = "the API key is in the file that SPARKFORGE_API_KEY_FILE names; the URL has no path"
        raise AcceptError(msg, hint) from None


def checked(subject: Subject, checks: Sequence[Check]) -> list[Row]:
    """Run checks in order, with a line for each."""
    rows = []
    for check in checks:
        log.detail(f"{check.name} …")
        rows.append(judged(check, subject))
        colour, mark = _MARKS[rows[-1].state]
        log.info(f"{log.painted(colour, mark)} {check.name}")
    return rows


def measured(subject: Subject, measure: Callable[[], gpqa.Score]) -> tuple[Row, gpqa.Score | None]:
    """Measure accuracy; return its row, and the score if there is one."""
    found: list[gpqa.Score] = []

    def look(subject: Subject) -> str:
        found.append(measure())
        return found[0].judge()

    row = judged(Check(ACCURACY, "", "see the server's log", look), subject)
    return row, found[0] if found else None


def show(rows: Iterable[Row]) -> None:
    """Print the table, and a hint for each failure."""
    found = list(rows)
    log.heading("results")
    log.table([(row.name, row.state, f"{row.seconds:.1f} s", row.words) for row in found])
    for row in found:
        if row.state == "fail":
            log.info(f"hint for {row.name}: {row.hint}")


def verdict(rows: Iterable[Row]) -> int:
    """Return the exit code, and print a line for each failure."""
    failed = [row for row in rows if row.state == "fail"]
    if not failed:
        return 0
    names = ", ".join(row.name for row in failed)
    error = AcceptError(
        f"the server fails {len(failed)} of the checks: {names}", "follow the hints above"
    )
    return log.failure(error)


def document(target: str, subject: Subject, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the document of ``--json``; docs/accept.md describes it."""
    counts = {state: sum(row.state == state for row in rows) for state in STATES}
    return {
        "target": target,
        "version": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "url": subject.place.url,
        "model": subject.model.name,
        "max_model_len": subject.model.max_len,
        "image": subject.behind.image,
        "ok": counts["fail"] == 0,
        "counts": counts,
        "checks": [dataclasses.asdict(row) for row in rows],
    }


def write(folder: Path, report: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """Write the report as JSON and as a page; return the page."""
    import json

    stem = f"accept-{report['when'].replace(':', '')}"
    text = json.dumps(report, indent=1, sort_keys=True) + "\n"
    write_file(folder / f"{stem}.json", text.encode())
    cells = [(row.name, row.state, f"{row.seconds:.1f}", row.words) for row in rows]
    hints = [(row.name, row.hint) for row in rows if row.state == "fail"]
    page = pages.render(_REPORT, document=report, rows=cells, hints=hints)
    file = folder / f"{stem}.md"
    write_file(file, page.encode())
    return file


def markdown() -> str:
    """Return the table of all checks."""
    return pages.table(
        ("check", "what has to be true"),
        [(check.name, pages.Markdown(check.what)) for check in CHECKS],
    )


COMMANDS = (Entry("accept", Options, run),)
