"""What bench and accept found on this machine, as tables with pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparkforge.core import plain
from sparkforge.core.errors import UsageError
from sparkforge.inspect.bench import result

_T = TypeVar("_T", bound=BaseModel)


class Part(BaseModel):
    """Of a document, the fields that the page needs."""

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
    """An SVG file in base64, and what it shows."""

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
    """Return the newest results of accept and bench.

    Args:
        folder: ``dist/TARGET``.

    Raises:
        UsageError, BenchError: one has another shape.
    """
    # one folder a run, of any name, and in it one for each side that was measured
    files = sorted(folder.glob(f"bench/**/{result.FILE}"), key=lambda file: file.stat().st_mtime_ns)
    runs = [file.relative_to(folder / "bench").parts[0] for file in files]
    found = sorted(file for file, run in zip(files, runs, strict=True) if run == runs[-1])
    accepted = sorted(folder.glob("accept/accept-*.json"))[-1:]
    return [*(_accepted(one, root) for one in accepted), *(_benched(one, root) for one in found)]


def _benched(file: Path, root: Path) -> Measured:
    run = result.load(file)
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


def _accepted(file: Path, root: Path) -> Measured:
    one = read(file, _Accepted, "build.py accept")
    return Measured(
        title=f"Acceptance of {one.model}, {one.when}",
        file=str(file.relative_to(root)),
        head=("check", "result", "seconds", "what was seen"),
        rows=[
            (
                row.name,
                row.state,
                f"{row.seconds:.1f}",
                row.seen or f"expected {row.expected}, got {row.got}",
            )
            for row in one.checks
        ],
    )


def read(path: Path, kind: type[_T], command: str) -> _T:
    """Read a document of an earlier command; UsageError if it is missing, or of another shape."""
    try:
        return kind.model_validate(plain.json_of(path.read_bytes()))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", f"run {command} first") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "make it readable") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}", f"run {command} again") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", f"run {command} again") from None
