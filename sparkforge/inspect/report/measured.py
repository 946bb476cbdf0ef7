"""Results of bench and accept on this machine, as tables with pictures."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparkforge.core import plain, typed
from sparkforge.core.errors import UsageError
from sparkforge.inspect.accept.row import ACCURACY, LOAD
from sparkforge.inspect.bench import compare, result
from sparkforge.inspect.bench.result import Result

_T = TypeVar("_T")
_KINDS = {"": "Acceptance", LOAD: "Load", ACCURACY: "Accuracy"}
"""Titles of accept's results, by the kind of its rows."""


class Part(BaseModel):
    """The fields of a document that the page needs."""

    model_config = ConfigDict(frozen=True)


class _Check(Part):
    name: str
    state: str
    seconds: float
    seen: str
    expected: str
    got: str


class _Accepted(Part):
    when: str
    url: str
    model: str
    checks: tuple[_Check, ...]


@dataclass(frozen=True)
class Picture:
    """An SVG file in base64, and its description."""

    alt: str
    base64: str


@dataclass(frozen=True)
class Measured:
    """A result of bench or accept on this machine: a table with its pictures."""

    title: str
    file: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    pictures: Sequence[Picture] = ()


def measured(root: Path, folder: Path) -> Sequence[Measured]:
    """Return the newest results: of accept each kind, then bench, then bench quality.

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
    ]


def _by_time(folder: Path, name: str) -> list[Path]:
    """Return bench's files of a name, the newest last."""
    return sorted(folder.glob(f"bench/**/{name}"), key=lambda file: file.stat().st_mtime_ns)


def _compared(found: Mapping[Path, Result], root: Path) -> Iterator[Measured]:
    """Yield the comparison of two sides of one run: the build with the release."""
    runs = sorted(found.values(), key=lambda run: run.identity.origin != "release")
    if len(runs) != 2 or runs[0].session != runs[1].session:
        return
    comparison = compare.compare(runs[0], runs[1])
    head, *rows = compare.table(comparison)
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
        pictures=[
            Picture(alt, base64.b64encode(picture.read_bytes()).decode())
            for name, alt in result.PICTURES.items()
            if (picture := file.with_name(name)).is_file()
        ],
    )


def _accepted(folder: Path, root: Path) -> Iterator[Measured]:
    """Yield the newest rows of each kind: a run has the checks or a load, and may have accuracy."""
    left = dict(_KINDS)
    for file in sorted(folder.glob("accept/accept-*.json"), reverse=True):
        if not left:
            return
        document = read(file, _Accepted, "build.py accept")
        rows: dict[str, list[Sequence[str]]] = {}
        for row in document.checks:
            words = row.seen or f"expected {row.expected}, got {row.got}"
            cells = (row.name, row.state, f"{row.seconds:.1f}\N{NO-BREAK SPACE}s", words)
            rows.setdefault(_kind(row.name), []).append(cells)
        for kind in [kind for kind in left if kind in rows]:
            yield Measured(
                title=f"{left.pop(kind)} of {document.model}, {document.when}",
                file=str(file.relative_to(root)),
                head=("check", "result", "time", "what was seen"),
                rows=rows[kind],
            )


def _kind(name: str) -> str:
    return name if name == ACCURACY else LOAD if name.startswith(LOAD) else ""


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
