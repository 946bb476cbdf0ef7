"""The carry table: every patch of every series against several releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import pages
from sparkforge.core.log import log
from sparkforge.maintain.rebase import release_spec
from sparkforge.maintain.rebase.patch_rebase import verdicts
from sparkforge.maintain.rebase.verdicts import PatchResult
from sparkforge.series.series import Series
from sparkforge.sources.project import Project

COMMAND = "rebase --all --onto latest:3 --table"


@dataclass(frozen=True)
class Column:
    """One release, and the result of each patch on it; None: the pinned one itself."""

    version: str
    results: tuple[PatchResult, ...] | None


@dataclass(frozen=True)
class Carried:
    """One series against the releases, oldest first."""

    series: Series
    version: str
    columns: tuple[Column, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return {
            "pinned": self.version,
            "releases": {
                column.version: None
                if column.results is None
                else [result.as_json() for result in column.results]
                for column in self.columns
            },
        }


def carried(project: Project, series: Sequence[Series], count: int) -> list[Carried]:
    """Try every series on the newest releases that the index has.

    Args:
        count: number of releases, including the pinned one if it is among them.
    """
    pins, tables = project.pins, []
    for one_series in series:
        upstream = pins.upstream(one_series.upstream)
        if not one_series.patches or upstream.source_file is None:
            continue
        owner = upstream if upstream.source_in is None else pins.upstream(upstream.source_in)
        # the owner's own file decides the releases; it is the smaller one
        versions = release_spec.newest(project.access, owner, count)
        columns = []
        for version in reversed(versions):
            if version == owner.version:
                columns.append(Column(version, None))
                continue
            with log.step(f"{one_series.upstream} on {version}"):
                spec = f"release:{version}"
                release = release_spec.resolve(project, one_series.upstream, spec)
                old = release_spec.old_source(project, one_series.upstream, release)
                results = verdicts(
                    project.store, one_series, old, release.source, rules=upstream.paths
                )
                columns.append(Column(version, tuple(results)))
        tables.append(Carried(one_series, owner.version, tuple(columns)))
    return tables


def cell(result: PatchResult) -> str:
    """Return a verdict as the table shows it."""
    if result.stops:
        mark = " (follows)" if result.after else ""
        return pages.Markdown(f"**{result.verdict.value}**{mark}")
    return f"{result.verdict.value}{' (remembered)' if result.remembered else ''}"


def rows(entry: Carried) -> list[tuple[str, ...]]:
    """Return one series as a table: a row a patch, a column a release."""
    names = [patch.name.removesuffix(".patch") for patch in entry.series.patches]
    columns = [("patch", *names)]
    for column in entry.columns:
        if column.results is None:
            columns.append((f"{column.version} (pinned)", *("applies" for _ in names)))
        else:
            columns.append((column.version, *map(cell, column.results)))
    return list(zip(*columns, strict=True))


def page(tables: Sequence[Carried]) -> str:
    """Return docs/carry.md."""
    return pages.render(
        Path(__file__).with_name("carry.md.j2"), command=COMMAND, found=tables, rows_of=rows
    )
