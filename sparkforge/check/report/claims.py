"""docs/claims.yaml: tests of features by machine, the data of docs/status.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sparkforge.core import pages
from sparkforge.core.errors import UsageError
from sparkforge.pins import yamlfile
from sparkforge.pins.types import Model

Machine = Literal["x86", "arm64", "h200", "spark"]
Level = Literal["proved", "partly", "simulated", "compiled", "not run"]
MACHINES: Mapping[Machine, str] = {
    "x86": "x86-64",
    "arm64": "arm64, emulated",
    "h200": "H200",
    "spark": "Spark",
}
"""The machines of the matrix, and the head of each column."""
LEVELS: Mapping[Level, str] = {
    "proved": "ran there, on the real thing",
    "partly": "some of it ran there",
    "simulated": "ran there against a simulated device, server or machine",
    "compiled": "compiled and disassembled there",
    "not run": "applies there, and nobody has run it",
}
"""The values of the matrix's cells, and their meaning."""
_Text = Annotated[str, Field(min_length=1)]


class Claim(Model):
    """A feature, and the evidence for it; texts are Markdown."""

    claim: _Text
    machines: Annotated[Mapping[Machine, Level], Field(min_length=1)]
    """Evidence by machine; the claim does not concern machines without an entry."""
    tested: _Text
    open: _Text | None = None
    """Missing tests; None: none known."""


class Area(Model):
    """Claims that belong together."""

    area: _Text
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]


def page(path: Path) -> str:
    """Return docs/status.md, from the claims.yaml beside it.

    Raises:
        UsageError: one of the two is missing or malformed.
    """
    areas = _load(path.with_name("claims.yaml"))
    text = pages.render(
        Path(__file__).with_name("status.md.j2"),
        areas=areas,
        head=["claim", *MACHINES.values()],
        rows=lambda area: [_row(claim) for claim in area.claims],
        evidence=_evidence,
        levels=LEVELS,
    )
    return pages.between(path, text)


def _row(claim: Claim) -> tuple[str, ...]:
    """Return a row of the matrix; ``proved`` and ``not run`` are bold."""
    cells = (claim.machines.get(machine, "") for machine in MACHINES)
    bold = ("proved", "not run")
    return (
        pages.Markdown(claim.claim),
        *(pages.Markdown(f"**{level}**" if level in bold else level) for level in cells),
    )


def _evidence(claim: Claim) -> str:
    left = "" if claim.open is None else f" *Open:* {claim.open}."
    return pages.Markdown(f"**{claim.claim}**: {claim.tested}.{left}")


def _load(path: Path) -> tuple[Area, ...]:
    """Read the claims.

    Raises:
        UsageError: it is missing or malformed.
    """
    hint = f"the head of docs/{path.name} describes the values"
    try:
        document = yamlfile.read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "restore it from git") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8", hint) from None
    except yamlfile.NotYamlError as error:
        raise UsageError(f"{path}:{error.line}: {error}", hint) from None
    for line, problem in document.problems:
        raise UsageError(f"{path}:{line}: {problem}", hint)
    try:
        return TypeAdapter(tuple[Area, ...]).validate_python(document.data)
    except ValidationError as error:
        first = error.errors()[0]
        line, where = document.line(first["loc"]), yamlfile.dotted(first["loc"])
        raise UsageError(f"{path}:{line}: {where}: {first['msg']}", hint) from None
