"""Results of bench and accept on this machine, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparkforge.core import plain, typed
from sparkforge.core.errors import UsageError
from sparkforge.inspect.bench import result
from sparkforge.inspect.bench.result import Result
from sparkforge.inspect.perf import losses

_T = TypeVar("_T")


class Part(BaseModel):
    """The fields of a document that the page needs."""

    model_config = ConfigDict(frozen=True)


class _Check(Part):
    name: str
    state: str
    seconds: float
    seen: str


class _Accepted(Part):
    when: str
    url: str
    model: str
    checks: tuple[_Check, ...]


@dataclass(frozen=True)
class Measured:
    """A result of bench or accept on this machine."""

    title: str
    file: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def measured(root: Path, folder: Path) -> Sequence[Measured]:
    """Return the newest results of accept, of bench and of bench quality.

    Args:
        folder: ``dist/TARGET``.

    Raises:
        UsageError, BenchError: a file has another shape.
    """
    # a folder for each run, with any name, and in it one for each side
    files = _by_time(folder, result.FILE)
    runs = [file.relative_to(folder / "bench").parts[0] for file in files]
    newest = sorted(file for file, run in zip(files, runs, strict=True) if run == runs[-1])
    found = {file: result.load(file) for file in newest}
    return [
        *_accepted(folder, root),
        *_compared(found, root),
        *(_benched(file, run, root) for file, run in found.items()),
        *(_quality(file, root) for file in _by_time(folder, losses.FILE)[-1:]),
    ]


def _by_time(folder: Path, name: str) -> list[Path]:
    """Return bench's files of a name, the newest last."""
    return sorted(folder.glob(f"bench/**/{name}"), key=lambda file: file.stat().st_mtime_ns)


def _compared(found: Mapping[Path, Result], root: Path) -> Iterator[Measured]:
    """Yield the comparison of two sides of one run: the build with the release."""
    runs = sorted(found.values(), key=lambda run: run.identity.origin != "release")
    if len(runs) != 2:
        return
    comparison = result.compare(runs[0], runs[1])
    head, *rows = result.table(comparison)
    sides = [f"{word}: {run.identity.origin}" for word, run in zip("AB", runs, strict=True)]
    clean = all(run.clean for run in runs)
    notes = [*sides, *comparison.differs, *(() if clean else ("not clean: no verdict counts",))]
    yield Measured(
        title=f"Speed beside the unpatched release, {runs[0].started}",
        file=f"{min(found).parent.parent.relative_to(root)}. {'; '.join(notes)}.",
        head=head,
        rows=rows,
    )


def _benched(file: Path, run: Result, root: Path) -> Measured:
    head, *rows = result.summary(run)
    state = "" if run.complete else " Incomplete."
    if run.disturbed:
        state += f" Disturbed: {'; '.join(run.disturbed)}."
    return Measured(
        title=f"Speed of {run.identity.model}, {run.identity.origin}, {run.started}",
        file=f"{file.relative_to(root)}.{state}",
        head=head,
        rows=rows,
    )


def _quality(file: Path, root: Path) -> Measured:
    found = losses.load(file)
    head, *rows = losses.table(found.report)
    failed = [f"{name} could not be served: {why}" for name, why in found.report.failed.items()]
    notes = "".join(f" {text}." for text in (*found.report.beyond, *failed))
    return Measured(
        title=f"Quantised layers of {Path(found.model).name}, {found.started}",
        file=f"{file.relative_to(root)}.{notes}",
        head=head,
        rows=rows,
    )


def _accepted(folder: Path, root: Path) -> Iterator[Measured]:
    """Yield the newest result of accept."""
    for file in sorted(folder.glob("accept/accept-*.json"))[-1:]:
        document = read(file, _Accepted, "build.py accept")
        yield Measured(
            title=f"Acceptance of {document.model}, {document.when}",
            file=str(file.relative_to(root)),
            head=("check", "result", "time", "what was seen"),
            rows=[
                (row.name, row.state, f"{row.seconds:.1f}\N{NO-BREAK SPACE}s", row.seen)
                for row in document.checks
            ],
        )


def read(path: Path, kind: type[_T], command: str) -> _T:
    """Read a document of an earlier command; UsageError if it is missing, or of another shape."""
    again = f"remove it, and run {command} again"
    try:
        return typed.adapter(kind).validate_python(plain.json_of(path.read_bytes()))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", f"run {command} first") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "make it readable") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}", again) from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", again) from None
